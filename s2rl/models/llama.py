"""Llama and the models that share its class (SmolLM2 among them)."""

from s2rl.models.adapter import ModelAdapter

LLAMA = ModelAdapter(architectures=("LlamaForCausalLM",), wrap_classes=("LlamaDecoderLayer",))
