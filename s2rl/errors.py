"""Exceptions that s2rl raises on purpose.

`UserError` and its children mean that the person who started the run can mend it: the message names the value, what is
allowed and the remedy, and the command line ends with `exit_code`. Everything else derives from `RunError`: the run
itself met something that it must not train through.
"""

from __future__ import annotations


class S2rlError(Exception):
    """Base class; `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(S2rlError, ValueError):
    """Input that the user can correct. The message names the value, what is allowed and the fix."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key or value that cannot be used; the message starts with the dotted key."""


class DataError(UserError):
    """A data file or row that cannot be used; the message names file and row."""


class ModelError(UserError):
    """A model folder, tokenizer or architecture that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to another run, or that could not be written."""


class StorageError(UserError):
    """A file of the run folder that could not be written: a full disk, missing rights."""


class RunError(S2rlError, RuntimeError):
    """The run cannot go on without risking wrong results."""


class ContractError(RunError):
    """Engine and learner disagree before the first step (log-probabilities, tokenizer, vocabulary, special ids)."""


class SyncError(RunError):
    """A weight sync that could not be proven: names the worker and the tensors or the probe that disagree."""


class StalledError(RunError):
    """A wait outlived its limit; the message says who waited for whom, since when, and the last error seen."""


class WorkerDied(RunError):
    """A rollout worker's process is gone. The trainer replaces it; it ends the run only when that keeps failing."""


class LearnerDied(RunError):
    """A learner rank's process is gone. The run ends at its last checkpoint."""


class Interrupted(S2rlError):
    """The person at the keyboard stopped the run (SIGINT). It ended cleanly, with a checkpoint."""

    exit_code = 130
