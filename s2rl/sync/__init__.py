"""Weight sync: fixed-size buckets over one process group that is built once, and the proof that what arrived is right.

Owns the transport (group, buckets, sender, receiver), the fingerprint and the two checks of `proof`. Knows neither FSDP
nor vLLM: the learner hands over an iterable of named tensors, the rollout worker takes an iterator of named tensors.
"""

from s2rl.sync.buckets import BucketPlan, manifest_digest
from s2rl.sync.fingerprint import fingerprint
from s2rl.sync.group import SyncGroup, free_port
from s2rl.sync.proof import check_fingerprints, check_probe
from s2rl.sync.receiver import WeightReceiver
from s2rl.sync.sender import WeightSender

__all__ = [
    "BucketPlan",
    "SyncGroup",
    "WeightReceiver",
    "WeightSender",
    "check_fingerprints",
    "check_probe",
    "fingerprint",
    "free_port",
    "manifest_digest",
]
