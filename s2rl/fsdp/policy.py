"""The module that FSDP shards: a causal language model whose forward returns log-probabilities instead of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from s2rl.fsdp.collate import ForwardInputs
from s2rl.fsdp.logprobs import token_logprobs


class Policy(nn.Module):
    """`model` is a transformers causal language model; this is the root FSDP unit.

    The output head is used inside the root's own forward, where FSDP has gathered it, and never called as a module:
    that is what lets it be applied in chunks, and lets tied weights live in the root unit.
    """

    def __init__(self, model: Any, *, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        positions_N: Tensor,
        targets_N: Tensor,
        model_inputs: Mapping[str, Tensor],
        banned_K: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] of the completion tokens and entropies [N], float32. Shapes as in `ForwardInputs`."""
        body = self.model.base_model
        if getattr(body, "rope_deltas", None) is not None:
            body.rope_deltas = None  # of some earlier batch; positions are always given
        output = body(input_ids=input_ids, position_ids=position_ids, use_cache=False, **model_inputs)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            output.last_hidden_state.flatten(0, 1).index_select(0, positions_N),
            weight_VH=head.weight,
            bias_V=head.bias,
            targets_N=targets_N,
            banned_K=banned_K,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
        )

    def logprobs(
        self, inputs: ForwardInputs, *, temperature: float, banned_K: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`forward` through the module's hooks. `banned_K` int64: ids that are never sampled.

        Tensors go in one by one: FSDP looks for them in plain containers only.
        """
        outputs: tuple[Tensor, Tensor] = self(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            positions_N=inputs.positions_N,
            targets_N=inputs.targets_N,
            model_inputs=dict(inputs.model_inputs),
            banned_K=banned_K,
            temperature=temperature,
        )
        return outputs
