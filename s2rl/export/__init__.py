"""Model folders from training checkpoints, byte for byte in the format of the folder that training began with.

    checkpoint (float32 masters) + source folder -> the source folder, with trained values in the trained tensors

The source's own headers and index are the contract: files, keys, shapes, types and everything that was not trained stay
as they are, because they are copied. Nothing here builds a model.
"""

from __future__ import annotations

from s2rl.export.verify import Finding, TensorReport, VerifyReport, verify_export
from s2rl.export.write import ExportResult, export_model

__all__ = ["ExportResult", "Finding", "TensorReport", "VerifyReport", "export_model", "verify_export"]
