"""`init("torch")`: torch.distributed with NCCL on CUDA and Gloo on CPU."""

from __future__ import annotations

from ._process_group import exports, on_cpu, start

__all__ = ["exports", "on_cpu", "start"]
