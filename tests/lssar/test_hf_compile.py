"""Graphs of transformers' models: compiled, exported, on no device; and torch.func, torch.jit."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from tiny_models import build, pack, padded, tokens
from transformers import StaticCache

from lssar.backends import attend
from lssar.errors import UserError
from lssar.hf.layer import attention_forward
from lssar.mechanisms import MECHANISMS, get_mechanism
from lssar.reference import attention_weights

WINDOW = {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}


def batch(side: str, *lengths: int):
    return padded([tokens(1, n)[0] for n in lengths], side)


def whole_graph(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True, dynamic=True, **options)


def same(got, expected, mask=None):
    mask = slice(None) if mask is None else mask == 1
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "mechanism", "changes"),
    [
        ("llama", "lssar", {}),
        pytest.param("gpt2", "lssar-softmax", {}, marks=pytest.mark.slow),
        pytest.param("mistral", "ssmax", WINDOW, marks=pytest.mark.slow),
        pytest.param("gemma3_text", "lssar", MIXED, marks=pytest.mark.slow),
    ],
)
def test_one_graph_for_every_length_and_mask(kind, mechanism, changes):
    model = build(kind, mechanism, **changes)
    graph, options = whole_graph(model), {"use_cache": False}
    with torch.no_grad():
        for length in (9, 12, 7):
            ids = tokens(2, length)
            same(graph(ids, **options).logits, model(ids, **options).logits)
        graph = whole_graph(model)
        for side, lengths in (("left", (9, 4)), ("right", (12, 5)), ("left", (7, 7))):
            ids, mask = batch(side, *lengths)
            given = options | {"attention_mask": mask}
            same(graph(ids, **given).logits, model(ids, **given).logits, mask)


@pytest.mark.slow
def test_packed_sequences_in_a_graph():
    model = build("llama", "lssar")
    graph = whole_graph(model)
    for lengths in ((5, 1, 8), (3, 9)):
        sequences = [tokens(1, n) for n in lengths]
        ids, place = pack(sequences)
        with torch.no_grad():
            got = graph(ids, position_ids=place, use_cache=False).logits
            alone = torch.cat([model(s).logits for s in sequences], dim=1)
            same(got, alone)
    with torch.no_grad():  # with a cache, out of the graph or not at all
        same(torch.compile(model, backend="eager")(ids, position_ids=place).logits, alone)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="which cannot be cached"):
        whole_graph(model)(ids, position_ids=place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_static_cache_in_a_graph(kind):
    model = build(kind, "lssar", **WINDOW)
    graph, (ids, mask) = whole_graph(model), batch("left", 9, 6)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        cache = StaticCache(model.config, max_cache_len=12)
        parts = [
            graph(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
            for a, b in ((0, 6), (6, 7), (7, 8), (8, 9))
        ]
    same(torch.cat(parts, dim=1), expected, mask)


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_program_takes_other_lengths(masked):
    model, dim = build("llama", "lssar"), torch.export.Dim("length", min=3, max=64)
    example, mask = batch("left", 9, 4)
    given, shapes = {"input_ids": example}, {"input_ids": {1: dim}}
    if masked:
        given["attention_mask"], shapes["attention_mask"] = mask, {1: dim}
    shapes["use_cache"] = None
    options = {"use_cache": False}
    program = torch.export.export(model, (), given | options, dynamic_shapes=shapes).module()
    ids, mask = batch("right", 13, 6)
    given = {"input_ids": ids, **({"attention_mask": mask} if masked else {}), **options}
    with torch.no_grad():
        same(program(**given).logits, model(**given).logits, mask if masked else None)


@pytest.mark.slow
def test_gradients_of_a_graph():
    model, (ids, mask) = build("llama", "lssar"), batch("right", 9, 5)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        model.zero_grad()
        run(ids, attention_mask=mask, use_cache=False).logits[mask == 1].square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_a_mask_that_is_no_span_is_refused_in_a_graph_too():
    from transformers.masking_utils import create_causal_mask

    model = build("llama", "lssar")
    x = torch.zeros(1, 6, 24)

    def masks(x):
        odd = lambda batch, head, q, key: key % 2 == 0  # noqa: E731
        return create_causal_mask(model.config, x, None, None, and_mask_function=odd) + 0

    layer, q, k = model.model.layers[0].self_attn, torch.randn(1, 4, 6, 6), torch.randn(1, 2, 6, 6)
    with pytest.raises(UserError, match="other keys than a span up to itself"):
        attention_forward(MECHANISMS["lssar"], layer, q, k, k, masks(x))
    with pytest.raises(RuntimeError, match="other keys than a span up to itself"):
        whole_graph(masks)(x)


def test_a_model_on_no_device_has_shapes():
    with torch.device("meta"):
        model = build("llama", "lssar")
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 9, 31)
    long = torch.empty(1, 2, 5000, 6, device="meta")
    first = torch.zeros(5000, dtype=torch.long, device="meta")
    assert attend(long, long, long, "lssar", first=first).shape == long.shape


# --- attend itself ------------------------------------------------------------------------------


def by_weights(q, k, v, mechanism):
    return attention_weights(q, k, mechanism) @ v


@pytest.mark.parametrize("mechanism", ["lssar", "softmax", "sigmoid-logn"])
def test_transforms_of_functions_go_through_the_eager_form(mechanism):
    q, k, v = torch.randn(3, 1, 2, 9, 6, dtype=torch.float32).unbind()
    named, valued = mechanism, MECHANISMS[mechanism]

    def loss(attention):
        return lambda q: attention(q, k, v, valued).square().sum()

    got, expected = (torch.func.grad(loss(f))(q) for f in (attend, by_weights))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    many = torch.stack((q, 2 * q, -q))
    got = torch.func.vmap(lambda q: attend(q, k, v, named))(many)
    torch.testing.assert_close(got, torch.stack([by_weights(x, k, v, valued) for x in many]))
    got, expected = (
        torch.func.jvp(lambda q, f=f: f(q, k, v, valued), (q,), (k,))[1]
        for f in (attend, by_weights)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_or_computed_is_one_line():
    q, k, v = torch.randn(3, 1, 2, 9, 6).unbind()
    for backend in ("cpu", "rowblock"):
        with pytest.raises(UserError, match=r"torch.func and forward-mode AD cannot transform it"):
            torch.func.grad(lambda q, b=backend: attend(q, k, v, "lssar", backend=b).sum())(q)
    with pytest.raises(UserError, match=r"torch.jit.trace cannot record attention; use torch.exp"):
        torch.jit.trace(lambda q: attend(q, k, v, "lssar"), q)
    model = build("llama", "lssar", return_dict=False)
    with pytest.raises(UserError, match=r"torch.jit.trace cannot record"):
        torch.jit.trace(model, tokens(1, 5))
    with pytest.raises(UserError, match=r"floating-point tensors; got q torch.int8, k torch.float"):
        attend(q.to(torch.int8), k, v, "lssar")
    with pytest.raises(UserError, match=r"floating-point tensors; got .*v torch.int8"):
        attend(q, k, v.to(torch.int8), get_mechanism("lssar", p=3))


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="Inductor cannot link where a path has a space")
@pytest.mark.parametrize("mechanism", ["lssar", "lssar-softmax"])
def test_inductor_computes_the_same(mechanism):
    torch._dynamo.reset()
    model = build("llama", mechanism)
    graph = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for side, lengths in (("left", (9, 4)), ("right", (12, 5))):
            ids, mask = batch(side, *lengths)
            given = {"attention_mask": mask, "use_cache": False}
            same(graph(ids, **given).logits, model(ids, **given).logits, mask)
