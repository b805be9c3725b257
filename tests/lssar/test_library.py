"""What `import lssar` offers: its names, LSSAR by default, a backend for everything below it."""

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from cases import cases, example_of

import lssar
from lssar import backends, spans
from lssar.backends import attend, attend_padded, used_backend
from lssar.errors import UserError
from lssar.mechanisms import MECHANISMS
from lssar.reference import attention_weights
from model import GPT, preset

ROOT = Path(__file__).parents[2]
NAMES = {
    "MECHANISMS",
    "Mechanism",
    "attend",
    "attention_weights",
    "backend",
    "get_mechanism",
    "spans",
}
OLD = {
    "BACKENDS": backends.BACKENDS,
    "UserError": UserError,
    "attend_padded": attend_padded,
    "choose_backend": backends.choose_backend,
    "used_backend": used_backend,
}


def qkv(length: int = 9, width: int = 8, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, 2, length, width, dtype=dtype).unbind()


def run(program: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_the_top_level_has_seven_names_and_says_so():
    assert set(lssar.__all__) == NAMES
    done = run("import lssar; print(*dir(lssar))")  # before any of them was used
    assert set(done.stdout.split()) == NAMES | {"__version__"}, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        lssar.atend  # noqa: B018


def test_the_type_checker_knows_the_names(tmp_path):
    file = tmp_path / "user.py"
    lines = [f"lssar.{name}" for name in sorted(NAMES)]
    lines += ["lssar.atend", "lssar.attend(1, 2, 3)", "lssar.attend(backend=None)"]
    file.write_text("\n".join(["import lssar", *lines]))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [line.partition("user.py:")[2] for line in done.stdout.splitlines()]
    assert found[0].startswith('9: error: Module has no attribute "atend"'), done.stdout
    assert {line.partition(":")[0] for line in found} == {"9", "10", "11"}, done.stdout


def test_old_names_work_with_a_warning():
    for name, value in OLD.items():
        with pytest.warns(DeprecationWarning, match=rf"lssar\.{name} is now lssar\.\w+\.{name}"):
            assert getattr(lssar, name) is value, name
    q, k, v = qkv()
    scale = torch.rand(2)
    calls = {
        "attend": lambda **given: attend(q, k, v, "ssmax", **given),
        "attend_padded": lambda **given: attend_padded(q, k, v, "ssmax", None, **given),
        "attention_weights": lambda **given: attention_weights(q, k, "ssmax", **given),
    }
    for name, call in calls.items():
        with pytest.warns(DeprecationWarning, match="params is now called head_scale"):
            old = call(params=scale)
        assert torch.equal(old, call(head_scale=scale)), name
        with pytest.raises(UserError, match="give head_scale alone"):
            call(params=scale, head_scale=scale)


def test_the_default_is_lssar():
    q, k, v = qkv()
    assert torch.equal(attend(q, k, v), attend(q, k, v, "lssar"))
    assert torch.equal(attention_weights(q, k), attention_weights(q, k, "lssar"))


def test_a_backend_is_chosen_for_every_layer_of_a_model():
    model, tokens = GPT(preset("nano", "lssar")), torch.arange(13)[None]
    lssar_of_model = model.blocks[0].attention.mechanism
    for name in ("eager", "rowblock", "eager"):
        with lssar.backend(name):
            model(tokens)
            assert used_backend(lssar_of_model) == name
            with lssar.backend("rowblock"):
                model(tokens)
            assert used_backend(lssar_of_model) == "rowblock"
            model(tokens)
            assert used_backend(lssar_of_model) == name
    model(tokens)
    assert used_backend(lssar_of_model) not in ("eager", "rowblock")


def test_a_call_that_names_a_backend_has_the_last_word():
    q, k, v = qkv()
    with lssar.backend("eager"):
        attend(q, k, v, "lssa", backend="rowblock")
    assert used_backend(MECHANISMS["lssa"]) == "rowblock"


def test_a_backend_is_left_again_after_an_error():
    q, k, v = qkv()
    with pytest.raises(UserError, match="'sdpa' cannot take this call"), lssar.backend("sdpa"):
        attend(q, k, v)
    attend(q, k, v)  # again by any
    with (
        pytest.raises(UserError, match="unknown attention backend 'egaer'; did you mean 'eager'"),
        lssar.backend("egaer"),
    ):
        raise AssertionError("entered")


def test_a_backend_holds_in_other_threads_and_in_compiled_graphs():
    q, k, v = qkv()
    m = MECHANISMS["lssa"]
    compiled = torch.compile(lambda q: attend(q, k, v, "lssa"), backend="eager", fullgraph=True)
    compiled(q)
    before = used_backend(m)
    assert before != "eager"
    with lssar.backend("rowblock"):
        thread = threading.Thread(target=attend, args=(q, k, v, "lssa"))
        thread.start()
        thread.join()
        assert used_backend(m) == "rowblock"
    with lssar.backend("eager"):
        compiled(q)  # compiled again
        assert used_backend(m) == "eager"
    attend(q, k, v, "lssa", backend="rowblock")
    assert torch.equal(compiled(q), attend(q, k, v, "lssa", backend=before))


def test_the_environment_chooses_a_backend(monkeypatch):
    program = """
import torch
from lssar import MECHANISMS, attend, backend
from lssar.backends import used_backend
q = torch.randn(1, 2, 9, 8)
attend(q, q, q)
print(used_backend(MECHANISMS["lssar"]))
with backend("rowblock"):
    attend(q, q, q)
print(used_backend(MECHANISMS["lssar"]))
"""
    assert run(program, LSSAR_BACKEND="eager").stdout.split() == ["eager", "rowblock"]
    for wrong, what in (
        ("egaer", "LSSAR_BACKEND: unknown attention backend 'egaer'; did you mean 'eager'?"),
        ("sdpa", "LSSAR_BACKEND: attention backend 'sdpa' cannot take this call"),
    ):
        monkeypatch.setattr(backends, "_FROM_ENVIRONMENT", wrong)
        with pytest.raises(UserError, match=re.escape(what)):
            attend(*qkv())


def test_a_call_that_no_kernel_takes_says_once_why_it_is_slow(monkeypatch):
    monkeypatch.setattr(backends, "EAGER_ENTRIES", 0)
    backends._say_row_blocks.cache_clear()
    reasons = {
        "it computes in float32, not torch.float64": lambda: attend(*qkv(dtype=torch.float64)),
        "it takes head dimensions up to 256, not 300": lambda: attend(*qkv(width=300)),
        "its scores do not decay": lambda: attend(*qkv(), decay=-torch.rand(1, 2, 9)),
    }
    for reason, call in reasons.items():
        with pytest.warns(UserWarning) as said:
            call()
            call()
        (warning,) = said
        text = "attention 'lssar' is computed row block by row block, several times slower"
        assert str(warning.message).startswith(text), reason
        assert str(warning.message).endswith(f"by the cpu kernel: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*qkv(), backend="rowblock")  # as asked for
        attend(*qkv())  # by the kernel


def test_the_api_page_has_the_names_and_its_calls_work():
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    table = page.partition("## Names")[2].partition("Also:")[0]
    found = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))
    assert found == NAMES
    q, k, v = torch.randn(3, 1, 8, 1024, 16).unbind()
    known = {
        "q": q,
        "k": k,
        "v": v,
        "tokens": torch.randint(0, 9, (1, 1024)),
        "end": 0,
        "bounds": torch.tensor([0, 300, 1024]),
        "mask": torch.ones(1, 1024, dtype=torch.bool),
        "scale": torch.rand(8),
        "slopes": torch.rand(8),
        "attend_padded": attend_padded,
    }
    blocks = page.partition("## Calls")[2].partition("## Backends")[0].split("```python\n")[1:]
    calls = "".join(block.partition("```")[0] for block in blocks)
    exec(calls, known)
    assert known["weights"].shape == (1, 8, 1024, 1024)
    for name in NAMES:
        assert re.search(rf"\b{name}[(.\[]", calls), name
    for name in spans.__all__:
        assert f"spans.{name}(" in calls, name


def test_the_docstring_of_each_public_name_has_an_example_that_runs():
    q, k, v = qkv(length=1024)
    tokens = torch.randint(0, 9, (1, 1024))
    known = {
        "torch": torch,
        "lssar": lssar,
        "UserError": UserError,
        "attend_padded": attend_padded,
        "q": q,
        "k": k,
        "v": v,
        "tokens": tokens,
        "end_of_text": 0,
        "PADDING": 9,
        "mask": tokens != 9,
        "model": GPT(preset("nano", "lssar")),
    }
    known |= {name: getattr(lssar, name) for name in NAMES}
    known |= {name: getattr(spans, name) for name in spans.__all__}
    public = NAMES - {"MECHANISMS", "spans"} | set(spans.__all__) | {"UserError", "attend_padded"}
    for name in cases(sorted(public)):
        code = example_of(known[name])
        assert name in code
        exec(code, dict(known))
