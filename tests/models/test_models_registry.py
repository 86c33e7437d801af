from __future__ import annotations

import subprocess
import sys

import pytest

from s2rl.errors import ModelError
from s2rl.models import StoredPart, adapter_for, known_architectures


@pytest.mark.parametrize("architecture", known_architectures())
def test_every_known_architecture_is_a_class_of_transformers_with_the_layers_to_wrap(architecture: str):
    import importlib

    adapter, chosen = adapter_for([architecture])
    model_class = adapter.model_class(chosen)
    module = importlib.import_module(model_class.__module__)
    assert all(hasattr(module, name) for name in adapter.wrap_classes)


def test_the_first_known_entry_is_taken():
    assert adapter_for(["Something", "LlamaForCausalLM"])[1] == "LlamaForCausalLM"


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_unknown_architecture_is_refused_with_what_is_known_and_how_to_add_one(architectures):
    with pytest.raises(ModelError, match=r"known are LlamaForCausalLM, .*write a ModelAdapter in s2rl/models/"):
        adapter_for(architectures)


def test_a_class_that_transformers_lacks_is_named():
    adapter, _ = adapter_for(["LlamaForCausalLM"])
    with pytest.raises(ModelError, match="has no class NoSuchModel"):
        adapter.model_class("NoSuchModel")


def test_a_tied_head_is_stored_once_as_the_embedding():
    adapter, _ = adapter_for(["Qwen3ForCausalLM"])
    assert adapter.stored("lm_head.weight", (8, 4), tied=True, disk=()) == ()
    assert adapter.stored("lm_head.weight", (8, 4), tied=False, disk=()) == (StoredPart(name="lm_head.weight"),)
    assert adapter.stored("model.norm.weight", (4,), tied=True, disk=()) == (StoredPart(name="model.norm.weight"),)


def test_the_controller_can_use_registry_advantages_and_device_names_without_torch():
    code = (
        "import sys; import s2rl.models, s2rl.device, s2rl.algo.advantages, s2rl.algo.schedule; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'ray', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
