"""The bucket plan covers every byte of every tensor exactly once, in order, within its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2rl.sync import BucketPlan, manifest_digest
from s2rl.sync.buckets import ALIGNMENT, DIRECT_BYTES, DTYPE_BYTES, tensor_bytes
from s2rl.types import TensorSpec


@st.composite
def manifests(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=30))
    dtypes = st.sampled_from(sorted(DTYPE_BYTES))
    return [TensorSpec(name=f"t{i:03d}", shape=tuple(s), dtype=draw(dtypes)) for i, s in enumerate(shapes)]


@given(manifest=manifests(), bucket_bytes=st.integers(ALIGNMENT, 5000))
def test_every_byte_lies_in_exactly_one_place(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(manifest, bucket_bytes=bucket_bytes)
    order, next_offset = [], dict.fromkeys(range(len(manifest)), 0)
    for bucket in plan.buckets:
        assert 0 <= bucket.num_bytes <= plan.bucket_bytes <= bucket_bytes
        end = 0
        for piece in bucket.pieces:
            spec = manifest[piece.tensor]
            assert piece.bucket_offset >= end, "pieces of a bucket overlap"
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.tensor_offset == next_offset[piece.tensor], "a tensor's pieces are not in order"
            assert bucket.is_slice or piece.num_bytes == tensor_bytes(spec), "a packed tensor is in pieces"
            end = piece.bucket_offset + piece.num_bytes
            next_offset[piece.tensor] += piece.num_bytes
            order.append(piece.tensor)
        assert end == bucket.num_bytes
        assert not bucket.is_slice or len(bucket.pieces) == 1
    assert order == sorted(order)
    assert next_offset == {i: tensor_bytes(s) for i, s in enumerate(manifest)}
    assert set(order) == set(range(len(manifest))), "a tensor, perhaps an empty one, is in no bucket"
    assert plan.num_bytes == sum(math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in manifest)


@given(manifest=manifests(), bucket_bytes=st.integers(ALIGNMENT, 5000))
def test_no_two_neighbouring_packed_buckets_could_have_been_one(manifest: list[TensorSpec], bucket_bytes: int) -> None:
    plan = BucketPlan.build(manifest, bucket_bytes=bucket_bytes)
    for before, after in zip(plan.buckets, plan.buckets[1:], strict=False):
        if not before.is_slice and not after.is_slice:
            start = -(-before.num_bytes // ALIGNMENT) * ALIGNMENT
            assert start + after.pieces[0].num_bytes > plan.bucket_bytes


def test_tensors_from_one_mebibyte_on_travel_in_place() -> None:
    manifest = [
        TensorSpec(name="a", shape=(DIRECT_BYTES - 1,), dtype="uint8"),
        TensorSpec(name="b", shape=(DIRECT_BYTES,), dtype="uint8"),
        TensorSpec(name="c", shape=(9,), dtype="uint8"),
    ]
    plan = BucketPlan.build(manifest, bucket_bytes=16 << 20)
    assert [(b.is_slice, [p.tensor for p in b.pieces]) for b in plan.buckets] == [
        (False, [0]),
        (True, [1]),
        (False, [2]),
    ]


@pytest.mark.parametrize(
    ("names", "message"), [(["b", "a"], "after 'b'"), (["a", "a"], "'a' twice")], ids=["unsorted", "twice"]
)
def test_a_manifest_that_is_not_sorted_or_names_a_tensor_twice_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketPlan.build([TensorSpec(name=n, shape=(1,), dtype="float32") for n in names], bucket_bytes=1024)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'w' has dtype 'complex64'; allowed: .*bfloat16"):
        BucketPlan.build([TensorSpec(name="w", shape=(1,), dtype="complex64")], bucket_bytes=1024)


def test_the_digest_depends_on_everything_that_the_plan_depends_on() -> None:
    base = [TensorSpec(name="a", shape=(2, 3), dtype="float32")]
    others = [
        [TensorSpec(name="b", shape=(2, 3), dtype="float32")],
        [TensorSpec(name="a", shape=(3, 2), dtype="float32")],
        [TensorSpec(name="a", shape=(2, 3), dtype="bfloat16")],
        [],
    ]
    digests = {manifest_digest(m, bucket_bytes=1024) for m in [base, *others]} | {
        manifest_digest(base, bucket_bytes=2048)
    }
    assert len(digests) == 6
    assert all(0 <= d < 2**63 for d in digests)
