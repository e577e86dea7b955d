"""The network against twins: torch's own encoder, plain loops, and what each switch must change."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from network_variants import ABLATIONS, ablation
from torch import nn

from lattqe.errors import LattqeError
from lattqe.expansion import create
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.model.encoder import Head

SMALL = LAttQEConfig(dim=32, heads=4, layers=2, max_k=12, positional_start="small")
EXTENDED = dataclasses.replace(
    SMALL, width=24, ffn=40, similarity=True, relation_bias=True, power_start=2.0, auxiliary="cosine"
)


def make(config=SMALL, seed=0):
    """A network whose every parameter is off its start, so that nothing is right by being zero."""
    torch.manual_seed(seed)
    network = LAttQE(config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim <= 1 and "log" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def lists(n, k, dim, seed=0, high=0.85, low=0.25):
    """Unit vectors (n, 1 + k, dim): neighbors whose cosine with row 0 falls evenly from high to low."""
    generator = torch.Generator().manual_seed(seed)
    query = nn.functional.normalize(torch.randn(n, 1, dim, generator=generator), dim=-1)
    other = torch.randn(n, k, dim, generator=generator)
    other = nn.functional.normalize(other - (other * query).sum(-1, keepdim=True) * query, dim=-1)
    cosine = torch.linspace(high, low, k)[:, None]
    return torch.cat([query, cosine * query + (1 - cosine**2).sqrt() * other], dim=1)


def random_valid(n, k, seed=0):
    valid = torch.rand(n, 1 + k, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[:, 0] = True
    return valid


def torch_layer(encoder, config):
    """torch's own encoder layer with the parameters of ours."""
    layer = nn.TransformerEncoderLayer(
        config.token_width,
        config.heads,
        config.hidden,
        activation=config.activation,
        batch_first=True,
        norm_first=config.norm == "pre",
    ).eval()
    with torch.no_grad():
        for ours, theirs in [
            (encoder.qkv.weight, layer.self_attn.in_proj_weight),
            (encoder.qkv.bias, layer.self_attn.in_proj_bias),
            (encoder.out.weight, layer.self_attn.out_proj.weight),
            (encoder.out.bias, layer.self_attn.out_proj.bias),
            (encoder.up.weight, layer.linear1.weight),
            (encoder.up.bias, layer.linear1.bias),
            (encoder.down.weight, layer.linear2.weight),
            (encoder.down.bias, layer.linear2.bias),
            (encoder.norm_attention.weight, layer.norm1.weight),
            (encoder.norm_attention.bias, layer.norm1.bias),
            (encoder.norm_ffn.weight, layer.norm2.weight),
            (encoder.norm_ffn.bias, layer.norm2.bias),
        ]:
            theirs.copy_(ours)
    return layer


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoders_equal_those_of_torch(norm, activation):
    config = dataclasses.replace(SMALL, norm=norm, activation=activation, ffn=48)
    network = make(config)
    items, valid = lists(3, 7, 32), random_valid(3, 7)
    x = items + network.tokens.positions[:8]
    for encoder in network.stack.encoders:
        x = torch_layer(encoder, config)(x, src_key_padding_mask=~valid)
    x = network.stack.final(x)
    output = network(items, valid)
    torch.testing.assert_close(output.transformed[valid], x[valid], atol=1e-5, rtol=1e-5)
    cosine = nn.functional.cosine_similarity(x[:, :1], x, dim=-1)
    torch.testing.assert_close(output.weights, cosine * valid, atol=1e-5, rtol=1e-5)


def linear(module, x):
    return module.weight.detach().double().numpy() @ x + module.bias.detach().double().numpy()


def layer_norm(module, x):
    x = (x - x.mean()) / math.sqrt(x.var() + module.eps)
    return x * module.weight.detach().double().numpy() + module.bias.detach().double().numpy()


def twin(network, items, valid):
    """Weights and auxiliary logits of one list, token by token and head by head, in float64."""
    config = network.config
    vectors = items.double().numpy()
    tokens = []
    for i, vector in enumerate(vectors):
        token = network.tokens.projection.weight.detach().double().numpy() @ vector
        token = token + network.tokens.positions[i].detach().double().numpy()
        tokens.append(token + linear(network.tokens.similarity, np.array([vectors[0] @ vector])))
    size = config.token_width // config.heads
    for encoder in network.stack.encoders:
        q, k, v = zip(*(np.split(linear(encoder.qkv, token), 3) for token in tokens))
        after = []
        for i, token in enumerate(tokens):
            mixed = []
            for h in range(config.heads):
                part = slice(h * size, (h + 1) * size)
                factor = encoder.relation[h].item()
                logits = {
                    j: q[i][part] @ k[j][part] / math.sqrt(size) + factor * vectors[i] @ vectors[j]
                    for j in range(len(tokens))
                    if valid[j]
                }
                total = sum(math.exp(logit) for logit in logits.values())
                mixed.append(sum(math.exp(logit) / total * v[j][part] for j, logit in logits.items()))
            x = layer_norm(encoder.norm_attention, token + linear(encoder.out, np.concatenate(mixed)))
            hidden = np.maximum(linear(encoder.up, x), 0)
            after.append(layer_norm(encoder.norm_ffn, x + linear(encoder.down, hidden)))
        tokens = after
    power = math.exp(network.head.log_power.item())
    scale, bias = network.head.scale_bias.tolist()
    cosines = [float(tokens[0] @ t / np.linalg.norm(tokens[0]) / np.linalg.norm(t)) for t in tokens]
    weights = [math.copysign(abs(c) ** power, c) if ok else 0.0 for c, ok in zip(cosines, valid)]
    return weights, [scale * c + bias for c in cosines[1:]]


def test_every_extension_equals_plain_loops():
    network = make(EXTENDED)
    items, valid = lists(3, 6, 32, low=-0.5), random_valid(3, 6)
    output = network(items, valid)
    for row in range(3):
        weights, auxiliary = twin(network, items[row], valid[row].tolist())
        np.testing.assert_allclose(output.weights[row].detach(), weights, atol=1e-4)
        there = valid[row, 1:].numpy()
        np.testing.assert_allclose(output.auxiliary[row].detach()[there], np.array(auxiliary)[there], atol=1e-4)


@pytest.mark.parametrize("config", [SMALL, EXTENDED], ids=["paper", "extended"])
def test_the_tempered_softmax_equals_its_loop(config):
    network = make(config)
    items, valid = lists(4, 6, 32), random_valid(4, 6)
    plain, tempered = network(items, valid).weights, network(items, valid, dba=True).weights
    temperature = network.head.temperature.item()
    assert temperature == pytest.approx(0.1)
    for row in range(4):
        powers = [math.exp(w.item() / temperature) if ok else 0.0 for w, ok in zip(plain[row], valid[row])]
        np.testing.assert_allclose(tempered[row].detach(), np.array(powers) / sum(powers), atol=1e-5)


def test_only_the_temperature_learns_when_the_rest_is_frozen():
    network = make()
    network.requires_grad_(False)
    network.head.log_temperature.requires_grad_(True)
    network(lists(2, 5, 32), dba=True).weights[:, 1].sum().backward()
    assert float(network.head.log_temperature.grad) != 0


@pytest.mark.parametrize("config", [SMALL, EXTENDED], ids=["paper", "extended"])
def test_padding_changes_nothing_whatever_it_holds(config):
    network = make(config)
    items = lists(2, 9, 32)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[:, 6:] = False
    items[:, 6:] = 7.0
    padded, short = network(items, valid), network(items[:, :6])
    torch.testing.assert_close(padded.weights[:, :6], short.weights, atol=1e-5, rtol=1e-5)
    assert (padded.weights[:, 6:] == 0).all()


@pytest.mark.parametrize("changes", [{}, {"norm": "pre"}, {"attention": False}], ids=["post", "pre", "connected"])
def test_training_leaves_out_what_is_dropped_and_gets_the_same(changes):
    network = make(LAttQEConfig(**{**SMALL.to_dict(), "dropout": 0.0, **changes}))
    items, valid = lists(6, 9, 32), torch.rand(6, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    valid[:, 0] = True
    found = {}
    for training in (False, True):
        network.train(training).zero_grad()
        output = network(items, valid)
        ((output.weights**2).sum() + (output.auxiliary**2 * valid[:, 1:]).sum()).backward()
        found[training] = [output.weights, *(value.grad for value in network.parameters() if value.grad is not None)]
    assert len(found[True]) == len(found[False]) > 10
    for whole, packed in zip(found[False], found[True]):
        torch.testing.assert_close(packed, whole, atol=1e-5, rtol=1e-4)


def test_a_dropped_neighbor_leaves_the_ranks_of_the_others():
    network = make()
    items = lists(2, 5, 32)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[:, 2] = False
    closed = items[:, [0, 1, 3, 4, 5]]
    assert not torch.allclose(network(items, valid).weights[:, 3:], network(closed).weights[:, 2:], atol=1e-4)


def test_the_query_alone_has_weight_one():
    for dba in (False, True):
        output = make()(lists(2, 0, 32), dba=dba)
        torch.testing.assert_close(output.weights, torch.ones(2, 1))


def permuted(network, items):
    order = torch.tensor([0, 4, 2, 5, 1, 3])
    return network(items[:, order]).weights, network(items).weights[:, order]


def test_without_positions_order_does_not_matter():
    items = lists(3, 5, 32)
    ours, moved = permuted(make(ablation(SMALL, "no-position")), items)
    torch.testing.assert_close(ours, moved, atol=1e-5, rtol=1e-5)
    ours, moved = permuted(make(SMALL), items)
    assert not torch.allclose(ours, moved, atol=1e-4)


def test_position_only_ignores_content():
    network = make(ablation(SMALL, "no-visual"))
    torch.testing.assert_close(network(lists(3, 5, 32, 1)).weights, network(lists(3, 5, 32, 2)).weights)
    assert not torch.allclose(make()(lists(3, 5, 32, 1)).weights, make()(lists(3, 5, 32, 2)).weights, atol=1e-3)


def test_without_attention_a_weight_sees_only_its_item_and_the_query():
    items = lists(2, 5, 32)
    other = items.clone()
    other[:, 3] = lists(2, 5, 32, seed=9)[:, 5]
    keep = [0, 1, 2, 4, 5]
    alone = make(ablation(SMALL, "no-attention"))
    torch.testing.assert_close(alone(items).weights[:, keep], alone(other).weights[:, keep])
    assert not torch.allclose(make()(items).weights[:, keep], make()(other).weights[:, keep], atol=1e-4)
    assert not any("qkv" in name for name, _ in alone.named_parameters())


def test_clamping_changes_negative_weights_only():
    tokens, valid = torch.randn(4, 9, 32), random_valid(4, 8)
    kept = Head(SMALL)(tokens, valid).weights
    clamped = Head(ablation(SMALL, "clamped"))(tokens, valid).weights
    assert (kept < 0).any()
    torch.testing.assert_close(clamped, kept.clamp(min=0))


def test_a_power_keeps_the_sign():
    tokens, valid = torch.randn(4, 9, 32), random_valid(4, 8)
    cosine = Head(SMALL)(tokens, valid).weights
    powered = Head(dataclasses.replace(SMALL, power_start=3.0))(tokens, valid).weights
    assert (cosine < 0).any()
    torch.testing.assert_close(powered, cosine**3, atol=1e-5, rtol=1e-5)


def test_the_auxiliary_head():
    items = lists(2, 5, 32)
    network = make()
    output = network(items)
    expected = network.head.linear(output.transformed[:, 1:])[..., 0]
    torch.testing.assert_close(output.auxiliary, expected)
    bare = make(ablation(SMALL, "no-auxiliary"))
    assert bare(items).auxiliary is None
    assert not any("linear" in name for name, _ in bare.named_parameters())


def test_all_parameters_learn():
    for config in (SMALL, EXTENDED):
        network = make(config).train()
        output = network(lists(4, 6, 32), random_valid(4, 6))
        tempered = network(lists(4, 6, 32), random_valid(4, 6), dba=True)
        (output.weights[:, 1:].sum() + output.auxiliary.square().sum() + tempered.weights[:, 1].sum()).backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_each_encoder_starts_on_its_own():
    first, second = LAttQE(SMALL).stack.encoders
    for (name, one), two in zip(first.named_parameters(), second.parameters()):
        if one.ndim == 2:
            assert not torch.equal(one, two), name


def test_the_defaults_are_the_papers():
    config = LAttQEConfig()
    assert (config.dim, config.heads, config.layers, config.token_width, config.hidden) == (2048, 64, 3, 2048, 2048)
    assert (config.norm, config.auxiliary, config.attention, config.positional) == ("post", "linear", True, True)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LAttQE(config).parameters())
    encoder = 6 * 2048**2 + 6 * 2048 + 4 * 2048
    assert parameters == 3 * encoder + 129 * 2048 + (2048 + 1) + 1


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_every_ablation_runs(name):
    config = ablation(dataclasses.replace(SMALL, positional_start="zeros"), name)
    output = make(config)(lists(2, 4, 32), random_valid(2, 4))
    assert torch.isfinite(output.weights).all()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"norm": "batch"}, "norm"),
        ({"activation": "tanh"}, "activation"),
        ({"positional_start": "large"}, "positional_start"),
        ({"auxiliary": "yes"}, "auxiliary"),
        ({"heads": 5}, "5 heads"),
        ({"layers": 0}, "layers"),
        ({"width": 2.5}, "width"),
        ({"dropout": 1.0}, "dropout"),
        ({"dim": None}, "dim"),
        ({"temperature_start": None}, "temperature_start"),
        ({"attention": 1}, "attention"),
        ({"power_start": 0.0}, "power_start"),
        ({"temperature_start": -1.0}, "temperature_start"),
        ({"visual": False, "positional": False}, "sees nothing"),
        ({"visual": False, "positional_start": "zeros"}, "positional_start"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, word):
    with pytest.raises(LattqeError, match=word):
        dataclasses.replace(SMALL, **changes)


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(LattqeError, match="13 neighbors"):
        make()(lists(1, 13, 32))
    with pytest.raises(LattqeError, match="16 columns"):
        make()(lists(1, 3, 16))


def test_a_direct_network_adds_up_what_its_encoders_make(tmp_path):
    """The solution that the paper's text calls weak, for queries and for database rows, against loops."""
    network, items, valid = make(dataclasses.replace(SMALL, direct=True)), lists(4, 6, 32), random_valid(4, 6)
    network.save(str(tmp_path / "model"))
    x, neighbors, given = items[:, 0].numpy(), items[:, 1:].numpy(), valid[:, 1:].numpy()
    scores = np.einsum("nkd,nd->nk", neighbors, x)
    made = network(items.masked_fill(~valid[..., None], 0), valid).transformed.detach().numpy()
    for dba in (False, True):
        method = create("lattqe", model=str(tmp_path / "model"), dba=dba)
        assert method.shared_width == 0
        found = method.expand(x, neighbors, scores, given)
        assert np.array_equal(found.weights, valid.numpy())
        for row in range(4):
            total = sum(made[row, place] for place in range(7) if valid[row, place])
            np.testing.assert_allclose(found.vectors[row], total / np.linalg.norm(total), atol=1e-5)
    for wrong in ({"width": 16}, {"relational": True}):
        with pytest.raises(LattqeError, match="direct adds up tokens as vectors"):
            dataclasses.replace(SMALL, direct=True, **wrong)
