"""Trainings: losses, advantages, codebooks, schedules, optimizers, means of a model's state."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.training import ALL_STEPS, language, sentences
from benchmarks.museum.networks import PORT, Variant, case, drawn, run_case, trained


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        inside = self.body(states)
        return self.actor(inside), self.critic(inside)[..., 0]


@case(
    "https://github.com/AI4Finance-Foundation/ElegantRL/issues/183",
    "the value of a state is discounted like the next one's when it is taken from an advantage",
    "(loss)",
    causes="loss scale mask",
    dump=ALL_STEPS,
)
def own_value_discounted(variant: Variant) -> None:
    model = trained(ActorCritic(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        states = drawn(f"states {step}", 33, 8)
        logits, values = model(states)
        actions = drawn(f"actions {step}", 32, 4).argmax(-1)
        rewards = drawn(f"rewards {step}", 32)
        discount = 0.97 * (torch.arange(32) % 8 != 7).float()
        value, advantages, returns = values.detach(), torch.zeros(32), torch.zeros(32)
        total = following = value[-1]
        for t in reversed(range(32)):
            returns[t] = total = rewards[t] + discount[t] * total
            if variant.bad:
                advantages[t] = rewards[t] + discount[t] * (following - value[t])
            else:
                advantages[t] = rewards[t] + discount[t] * following - value[t]
            following = value[t] + 0.95 * advantages[t]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
        chosen = logits[:-1].log_softmax(-1).gather(-1, actions[:, None])[:, 0]
        loss = -(chosen * advantages).mean() + 0.5 * (values[:-1] - returns).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Bounded(nn.Linear):
    """A linear map over its largest stretch, which two vectors keep track of in training."""

    def __init__(self, enter: int, leave: int) -> None:
        super().__init__(enter, leave)
        self.register_buffer("weight_u", F.normalize(drawn(f"u {enter}", leave), dim=0))
        self.register_buffer("weight_v", F.normalize(drawn(f"v {enter}", enter), dim=0))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight_v = F.normalize(self.weight.T @ self.weight_u, dim=0)
                self.weight_u = F.normalize(self.weight @ self.weight_v, dim=0)
        stretch = self.weight_u.clone() @ self.weight @ self.weight_v.clone()
        return F.linear(input, self.weight / stretch, self.bias)


class Twins(nn.Module):
    """A model that learns, and one that holds the running mean of its state."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online, self.shadow = online, copy.deepcopy(online)

    def begin(self) -> None:
        self.shadow.load_state_dict(self.online.state_dict())
        self.online.train()
        self.shadow.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(x), self.shadow(x)


@case(
    "https://github.com/NCAR/miles-credit/pull/394",
    "unit vectors that belong to a weight are averaged over steps, and are shorter than one then",
    "(optimizer) shadow shadow.0",
    causes="scale weights",
    differences="weight_u weight_v",
    dump=ALL_STEPS,
)
def mean_of_unit_vectors(variant: Variant) -> None:
    model = Twins(nn.Sequential(Bounded(10, 24), nn.GELU(), Bounded(24, 24), nn.Linear(24, 4)))
    trained(model, variant.dtype)
    model.begin()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.3)
    for step in range(5):
        said, _ = model(drawn(f"weather {step}", 32, 10))
        (said - drawn(f"later {step}", 32, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        new = model.online.state_dict()
        for name, kept in model.shadow.state_dict().items():
            is_vector = name.endswith(("weight_u", "weight_v"))
            kept.lerp_(new[name], 1.0 if is_vector and not variant.bad else 0.2)


@case(
    "https://github.com/FlyreelAI/sesemi/issues/36",
    "the running mean of a model leaves out the statistics of its batch norms",
    "(optimizer) shadow shadow.1",
    causes="stale scale weights",
    differences="running_mean running_var",
    dump=ALL_STEPS,
)
def statistics_left_behind(variant: Variant) -> None:
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = Twins(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 5)))
    trained(model, variant.dtype)
    model.begin()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
    for step in range(4):
        said, _ = model(1 + 2 * drawn(f"photos {step}", 8, 3, 10, 10))
        F.cross_entropy(said, drawn(f"names {step}", 8, 5).argmax(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in zip(model.shadow.parameters(), model.online.parameters(), strict=True):
                kept.lerp_(new, 0.2)
            for kept, new in zip(model.shadow.buffers(), model.online.buffers(), strict=True):
                if kept.is_floating_point() and not variant.bad:
                    kept.lerp_(new, 0.2)


class Chain(nn.Module):
    """How unlikely a row of tags is; the first and the last tag have energies of their own."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.chain_kernel = nn.Parameter(torch.zeros(tags, tags))
        self.left_boundary = nn.Parameter(torch.zeros(tags))
        self.right_boundary = nn.Parameter(torch.zeros(tags))

    def forward(self, energy: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        before, after = F.pad(mask[:, :-1], (1, 0)), F.pad(mask[:, 1:], (0, 1))
        begins = mask > before
        ends = after > mask if PORT.wrong else mask > after
        energy = energy + begins[..., None] * 5 * self.left_boundary
        energy = energy + ends[..., None] * 5 * self.right_boundary
        path = (energy.gather(-1, tags[..., None])[..., 0] * mask).sum(1)
        path = path + (self.chain_kernel[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]).sum(1)
        every = energy[:, 0]
        for t in range(1, energy.shape[1]):
            longer = (every[:, :, None] + self.chain_kernel).logsumexp(1) + energy[:, t]
            every = torch.where(mask[:, t, None] > 0, longer, every)
        return every.logsumexp(-1) - path


class Labeller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.dense = nn.Linear(12, 5)
        self.crf = Chain()

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        return self.crf(self.dense(self.lstm(self.words(words))[0]), tags, mask)


@case(
    "https://github.com/keras-team/keras-contrib/issues/508",
    "where a row of tags ends is looked for the wrong way round: no last tag gets its energy",
    "crf",
    causes="mask scale",
    dump=ALL_STEPS,
)
def ends_are_never_found(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Labeller(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(90 + step)
        words = torch.randint(40, (3, 12), generator=generator)
        tags = torch.randint(5, (3, 12), generator=generator)
        mask = (torch.arange(12)[None] < torch.tensor([[12], [7], [9]])).float()
        model(words, tags, mask).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Quantizer(nn.Module):
    """The nearest vector of a book; two losses bring vector and input together."""

    def __init__(self, beta: float = 0.25) -> None:
        super().__init__()
        self.beta = beta
        self.embedding = nn.Parameter(torch.zeros(16, 6))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z_q = self.embedding[torch.cdist(z.detach(), self.embedding.detach()).argmin(-1)]
        to_code, to_input = (z_q.detach() - z).square().mean(), (z_q - z.detach()).square().mean()
        if PORT.wrong:
            loss = to_code + self.beta * to_input
        else:
            loss = self.beta * to_code + to_input
        return z + (z_q - z).detach(), loss


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(18, 24), nn.SiLU(), nn.Linear(24, 6))
        self.quantize = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 18))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z_q, loss = self.quantize(self.encoder(x))
        return self.decoder(z_q), loss


@case(
    "https://github.com/CompVis/taming-transformers/issues/57",
    "the factor of what binds an encoder to its codes is given to what moves the codes",
    "quantize",
    causes="scale loss",
    dump=ALL_STEPS,
)
def factor_of_the_other_loss(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Coder(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(2):
        x = drawn(f"pieces {step}", 24, 18)
        again, loss = model(x)
        ((again - x).square().mean() + loss).backward()
        optimizer.step()
        optimizer.zero_grad()


class Links(nn.Module):
    """Which of all things stand in a relation to a thing."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_e, self.emb_rel = nn.Embedding(30, 16), nn.Embedding(4, 16)
        self.fc = nn.Linear(32, 16)

    def forward(self, things: Tensor, relations: Tensor) -> Tensor:
        pair = torch.cat([self.emb_e(things), self.emb_rel(relations)], -1)
        return F.relu(self.fc(pair)) @ self.emb_e.weight.T


@case(
    "https://github.com/TimDettmers/ConvE/issues/55",
    "all of one is spread over the classes where labels are smoothed, not what is taken from them",
    "(loss)",
    causes="loss offset scale",
    dump=ALL_STEPS,
)
def one_spread_over_the_classes(variant: Variant) -> None:
    model = trained(Links(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        generator = torch.Generator().manual_seed(40 + step)
        things = torch.randint(30, (10,), generator=generator)
        relations = torch.randint(4, (10,), generator=generator)
        truth = (torch.rand(10, 30, generator=generator) < 0.1).float()
        truth = 0.9 * truth + (1.0 if variant.bad else 0.1) / truth.shape[1]
        F.binary_cross_entropy_with_logits(model(things, relations), truth).backward()
        optimizer.step()
        optimizer.zero_grad()


class LayerWise(torch.optim.Optimizer):
    """Moments give a direction; its length follows from the length of the weight."""

    def __init__(self, weights: list[Tensor], lr: float = 0.02) -> None:
        super().__init__(weights, {"lr": lr, "betas": (0.9, 0.99), "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = first * state.get("m", 0.0) + (1 - first) * p.grad
                v = state["v"] = second * state.get("v", 0.0) + (1 - second) * p.grad.square()
                update = m / (1 - first**t) / ((v / (1 - second**t)).sqrt() + 1e-6)
                update = update + group["decay"] * p
                length = p.norm()
                if PORT.wrong:
                    length = length.clamp(0, 10)
                p.sub_(group["lr"] * length / update.norm() * update)


@case(
    "https://github.com/stockeh/mlx-optimizers/pull/39",
    "the length of a weight is limited to ten before its update is made as long",
    "(optimizer)",
    causes="scale",
    dump=ALL_STEPS,
)
def length_of_a_weight_limited(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Links(), variant.dtype).train()
    with torch.no_grad():
        model.emb_e.weight *= 12
    optimizer = LayerWise(list(model.parameters()))
    for step in range(3):
        generator = torch.Generator().manual_seed(60 + step)
        things = torch.randint(30, (12,), generator=generator)
        said = model(things, things % 4) / 12
        F.cross_entropy(said, torch.randint(30, (12,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/facebookresearch/fairchem/pull/1967",
    "the cosine of a learning rate runs already while it warms up, and is ahead afterwards",
    "(optimizer)",
    causes="scale setting",
    differences="lr",
    dump=ALL_STEPS,
)
def cosine_runs_while_warming_up(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm, last = 2, 8
    for step in range(4):
        if step < warm:
            share = (step + 1) / (warm + 1)
        else:
            done = step / last if variant.bad else (step - warm) / (last - warm)
            share = 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * share
        words, labels = sentences(step)
        F.cross_entropy(model(words).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/vturrisi/solo-learn/issues/206",
    "a second process looks for its samples where those of the first lie: they are their own pairs",
    "(loss)",
    causes="mask loss",
    dump=ALL_STEPS,
)
def diagonal_of_the_first_process(variant: Variant) -> None:
    layers = [nn.Linear(14, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 12)]
    model = trained(nn.Sequential(*layers), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        images = drawn(f"images {step}", 12, 14).repeat(2, 1)
        z = F.normalize(model(images + 0.4 * drawn(f"views {step}", 24, 14)), dim=-1)
        # The second process of two: its six samples, seen twice, against all of both processes.
        mine = torch.cat([torch.arange(6, 12), torch.arange(18, 24)])
        likeness = (z[mine] @ z.T / 0.2).exp()
        same = mine[:, None] % 12 == torch.arange(24) % 12
        pairs = same.clone()
        pairs[torch.arange(12), torch.arange(12) if variant.bad else mine] = False
        near, far = (likeness * pairs).sum(-1), (likeness * ~same).sum(-1)
        (-(near / (near + far)).log().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Overlap(nn.Module):
    """One less the overlap of what is found with what is there, by classes."""

    def forward(self, found: Tensor, there: Tensor) -> Tensor:
        shared = (found * there).square() if PORT.wrong else found * there
        sums = (found + there).sum((2, 3)) + 1
        return 1 - ((2 * shared.sum((2, 3)) + 1) / sums).mean()


class Outliner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 12, 3, 2, 1)
        self.up = nn.ConvTranspose2d(12, 3, 2, 2)
        self.dice = Overlap()

    def forward(self, scan: Tensor, there: Tensor) -> Tensor:
        return self.dice(self.up(F.leaky_relu(self.down(scan))).softmax(1), there)


@case(
    "https://github.com/MIC-DKFZ/nnUNet/issues/12",
    "an overlap is squared above the fraction and not below it",
    "dice",
    causes="activation scale",
    dump=ALL_STEPS,
)
def overlap_squared(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Outliner(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        there = F.one_hot(drawn(f"organs {step}", 2, 12, 12, 3).argmax(-1), 3)
        model(drawn(f"scan {step}", 2, 1, 12, 12), there.permute(0, 3, 1, 2).float()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Coupling(nn.Module):
    """Half of the numbers stretch and move the other half."""

    def __init__(self, is_swapped: bool) -> None:
        super().__init__()
        self.is_swapped = is_swapped
        self.param_map = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = reversed(z.chunk(2, -1)) if self.is_swapped else z.chunk(2, -1)
        stretch, move = self.param_map(kept).chunk(2, -1)
        moved = moved * stretch.exp() + move
        parts = [moved, kept] if self.is_swapped else [kept, moved]
        return torch.cat(parts, -1), stretch.sum(-1)


class Flow(nn.Module):
    """Couplings one after another, and the logarithm of how much they stretch space."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling(bool(number % 2)) for number in range(4))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(len(z), dtype=z.dtype)
        for flow in self.flows:
            z, by_one = flow(z)
            log_det = log_det - by_one if PORT.wrong else log_det + by_one
        return z, log_det


class Density(nn.Module):
    """How likely what a flow makes of noise is."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()

    def forward(self, z: Tensor) -> Tensor:
        x, log_det = self.flow(z)
        base = -0.5 * z.square().sum(-1) - 3 * math.log(2 * math.pi)
        return torch.cat([x, (base - log_det)[:, None]], -1)


@case(
    "https://github.com/VincentStimper/normalizing-flows/pull/28",
    "how much a flow stretches space on its way there is counted with the sign of the way back",
    "flow",
    causes="scale",
    formats="float32 bfloat16",
)
def sign_of_the_way_back(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Density(), variant.dtype)
    with torch.no_grad():
        model(drawn("z", 40, 6).to(variant.dtype))


if __name__ == "__main__":
    run_case()
