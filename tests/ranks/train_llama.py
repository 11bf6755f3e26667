"""A small Llama of transformers, trained for two steps; tensor parallel in a torchrun job."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=128,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
if WORLD > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    plan = {}
    for n in range(config.num_hidden_layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            plan[f"model.layers.{n}.{name}"] = ColwiseParallel()
        plan[f"model.layers.{n}.mlp.gate_proj"] = ColwiseParallel()
        plan[f"model.layers.{n}.mlp.up_proj"] = ColwiseParallel()
        plan[f"model.layers.{n}.self_attn.o_proj"] = RowwiseParallel()
        plan[f"model.layers.{n}.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    if step == 1 and "killed" in sys.argv and dist.get_rank() == 1:
        time.sleep(3)  # what was captured is on its way to the disk
        os.kill(os.getpid(), signal.SIGKILL)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
