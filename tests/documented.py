"""Environments that cannot be captured here, written after their documentation; each says where it is from."""

from __future__ import annotations

import json

# Azure Machine Learning, "Distributed GPU training guide": variables of the PyTorch distribution.
AZUREML_PYTORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "AZUREML_RUN_ID": "dreamy_clock_1f2z7",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}

# Kubeflow training operator v1, PyTorchJob with one process a pod.
PYTORCHJOB = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "digits-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NNODES": "3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


def tf_config(task: str, index: object, **cluster: list[str]) -> dict[str, str]:
    """TF_CONFIG as in TensorFlow's guide "Multi-worker training with Keras"; default: a chief and two workers."""
    cluster = cluster or {"chief": ["10.0.0.4:2222"], "worker": ["10.0.0.5:2222", "10.0.0.6:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}
