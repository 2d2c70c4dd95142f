"""Whether a rank has failed of its device, or of the hardware between devices, and not of its script."""

from __future__ import annotations

from .exit_status import ExitStatus

# Texts of CUDA's errors: cuda_runtime_api.h, cudaGetErrorString; of the driver's Xid 79; of NCCL,
# ncclGetErrorString; of HIP, hip_runtime_api.h. Others may be of a bug in the script.
_TEXTS = (
    "uncorrectable ECC error encountered",
    "hardware stack error",
    "uncorrectable NVLink error",
    "no CUDA-capable device is detected",
    "CUDA-capable device(s) is/are busy or unavailable",
    "GPU is lost",
    "has fallen off the bus",
    "NVRM: Xid",
    "ncclInternalError",
    "hipErrorECCNotCorrectable",
)


def is_of_device(end: ExitStatus) -> bool:
    """Whether its host must be repaired before it is used again."""
    message = end.traceback
    if end.exception is not None:
        message += end.exception.message
    return any(text in message for text in _TEXTS)
