"""Programs on graphs, molecules, fields and tables."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.third_party.catalogue import Use, program
from benchmarks.third_party.faults import attribute, scaled, tensor_changed, wrapped


@program(
    "torch_geometric",
    "a graph convolution without self-loops",
    attribute("convs.1", "add_self_loops", False),
    ("convs.1",),
)
def pyg_gcn(use: Use) -> None:
    from torch_geometric.nn import GCN

    model = use.ready(GCN(8, 16, num_layers=3, out_channels=4).eval())
    edges = use.numbers(20, 2, 60)
    with torch.no_grad():
        model(use.drawn(20, 8), edges)


@program(
    "torch_geometric",
    "attention over edges without the slope of its leaky ReLU",
    attribute("convs.1", "negative_slope", 0.0),
    ("convs.1",),
    "bfloat16",
)
def pyg_gat(use: Use) -> None:
    from torch_geometric.nn import GAT, global_mean_pool

    model = use.ready(GAT(8, 16, num_layers=3, out_channels=4, v2=True, heads=2).eval())
    edges = use.numbers(20, 2, 60)
    groups = torch.arange(20) // 10
    with torch.no_grad():
        global_mean_pool(model(use.drawn(20, 8), edges), groups)


@program(
    "e3nn",
    "weights of a tensor product too large",
    scaled("mp.layers.1.first.lin2", "weight", 1.5),
    ("mp.layers.1.first.lin2",),
)
def e3nn_points(use: Use) -> None:
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    network = SimpleNetwork("4x0e", "1x0e+1x1o", 2.0, 4.0, 8.0, mul=8, layers=2, lmax=1)
    network = use.ready(network.eval())
    with torch.no_grad():
        network(
            {
                "pos": use.drawn(8, 3),
                "x": use.drawn(8, 4),
                "batch": torch.zeros(8, dtype=torch.long),
            }
        )


@program(
    "neuraloperator",
    "a spectral weight conjugated",
    tensor_changed("fno_blocks.convs.1.weight", "tensor", torch.conj_physical),
    ("fno_blocks.convs.1",),
)
def neuraloperator_fno(use: Use) -> None:
    from neuralop.models import FNO

    model = FNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=3)
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.drawn(2, 1, 16, 16))


@program(
    "tab-transformer-pytorch",
    "a layer norm with a large epsilon",
    attribute("transformer.layers.1.1.branch.norm", "eps", 0.5),
    ("transformer.layers.1.1.branch.norm",),
    "bfloat16",
)
def tabular_transformer(use: Use) -> None:
    from tab_transformer_pytorch import TabTransformer

    model = TabTransformer(
        categories=(4, 5, 6),
        num_continuous=5,
        dim=16,
        dim_out=2,
        depth=2,
        heads=2,
        dim_head=8,
        mlp_act=nn.ReLU(),
    )
    model = use.ready(model.eval())
    with torch.no_grad():
        model(use.numbers(4, 6, 3), use.drawn(6, 5))


@program(
    "pytorch-tabnet",
    "a softmax over the batch, not over the features, selects them",
    wrapped(
        "tabnet.encoder.att_transformers.0.selector", lambda forward, x: forward(x.T.contiguous()).T
    ),
    ("tabnet.encoder.att_transformers.0.selector",),
)
def tabnet(use: Use) -> None:
    from pytorch_tabnet.tab_network import TabNet

    network = TabNet(10, 2, n_d=8, n_a=8, n_steps=2, group_attention_matrix=torch.eye(10))
    network = use.ready(network.eval())
    with torch.no_grad():
        network(use.drawn(12, 10))
