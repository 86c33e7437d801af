"""The dense Qwen2 and Qwen3 text models."""

from s2rl.models.adapter import ModelAdapter

QWEN2 = ModelAdapter(architectures=("Qwen2ForCausalLM",), wrap_classes=("Qwen2DecoderLayer",))
QWEN3 = ModelAdapter(architectures=("Qwen3ForCausalLM",), wrap_classes=("Qwen3DecoderLayer",))
