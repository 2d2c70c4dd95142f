"""Environments that cannot be captured here, written after their documentation; each says where it is from."""

import json


def _env(text: str) -> dict[str, str]:
    """An environment, variable by variable."""
    return dict(word.split("=", 1) for word in text.split())


# Azure Machine Learning, "Distributed GPU training guide": variables of the PyTorch distribution.
AZUREML_PYTORCH = _env("""
    RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 AZUREML_RUN_ID=dreamy_clock_1f2z7
    AZ_BATCH_MASTER_NODE=10.0.0.4:6000
""")

# A command that is started once on each of two nodes, without a number of a process.
AZUREML_NODE = _env("NODE_RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105")

# Kubeflow training operator v1, PyTorchJob with one process per pod.
PYTORCHJOB = _env("""
    RANK=2 WORLD_SIZE=3 MASTER_ADDR=digits-master-0 MASTER_PORT=23456 PYTHONUNBUFFERED=1 PET_NPROC_PER_NODE=auto
    PET_NNODES=3 KUBERNETES_SERVICE_HOST=10.96.0.1
""")


def tf_config(task: str, index: object, **cluster: list[str] | str) -> dict[str, str]:
    """TF_CONFIG as in TensorFlow's guide "Multi-worker training with Keras"; default: a chief and two workers."""
    cluster = cluster or {"chief": ["10.0.0.4:2222"], "worker": ["10.0.0.5:2222", "10.0.0.6:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})}


# Kubeflow training operator v1, pkg/controller.v1/pytorch/envvar.go: nprocPerNode "4", the last of 3 pods.
PYTORCHJOB_4_A_POD = {
    **PYTORCHJOB,
    "WORLD_SIZE": "12",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
}

# Kubeflow Trainer v2, pkg/runtime/framework/plugins/torch/torch.go: the second of 2 nodes.
TRAINJOB = _env("""
    PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1 PET_MASTER_ADDR=digits-node-0-0.digits PET_MASTER_PORT=29500
    KUBERNETES_SERVICE_HOST=10.96.0.1
""")

# Volcano, plugins pytorch, svc and env: 1 master, 2 workers, the last worker.
VOLCANO = _env("""
    RANK=2 WORLD_SIZE=3 MASTER_ADDR=digits-master-0.digits MASTER_PORT=23456 VC_TASK_INDEX=1 VK_TASK_INDEX=1
    VC_MASTER_HOSTS=digits-master-0.digits VC_WORKER_HOSTS=digits-worker-0.digits,digits-worker-1.digits
    KUBERNETES_SERVICE_HOST=10.96.0.1
""")

# AWS Batch user guide, "Environment variables" of multi-node parallel jobs: a child node.
AWSBATCH = _env("""
    AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 AWS_BATCH_JOB_NODE_INDEX=2 AWS_BATCH_JOB_NUM_NODES=3
    AWS_BATCH_JOB_MAIN_NODE_INDEX=0 AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4
""")

# SageMaker Training Toolkit, README, "Environment variables": the second host of two.
SAGEMAKER = _env("""
    SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=1 SM_NETWORK_INTERFACE_NAME=eth0
    TRAINING_JOB_NAME=digits-2026-11-21-09-12-41-001
""")

# PyTorch Lightning's LSFEnvironment and its tests; jsrun sets Open MPI's variables as well, for Spectrum MPI.
JSRUN = _env("""
    LSB_JOBID=1234 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 OMPI_COMM_WORLD_RANK=3
    OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1
""")

# HPE, pals.h, "Environment variables available for applications": 4 ranks, 2 a node.
PALS = _env("""
    PBS_JOBID=4242.pbs-01 PALS_APID=f3b9c7e2-0a53-4d2f-9a7e-2f1f4f0a7f00 PALS_RANKID=3 PALS_NODEID=1 PALS_LOCAL_RANKID=1
    PALS_LOCAL_SIZE=2 PALS_DEPTH=1 PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
""")

# flux-core, doc/man7/flux-environment.rst: 4 tasks on 2 nodes.
FLUX = _env("""
    FLUX_URI=local:///run/flux/local-0 FLUX_JOB_ID=ƒD2e73NP FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=3
    FLUX_TASK_LOCAL_ID=1 PMI_RANK=3 PMI_SIZE=4 PMI_FD=12
""")

# PyTorch Lightning 2.6, strategies/launchers/subprocess_script.py: the second of two processes.
LIGHTNING = _env("LOCAL_RANK=1 NODE_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=45741")
