"""The library on its own: installed in three ways, beside other people's modules, typed."""

import inspect
import os
import subprocess
import sys
import zipfile

import pytest
from checkout import ROOT, tracked

import lssar
from lssar import cpu_build

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
CLONED = ["lssar", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE", ".gitignore"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]

PROGRAM = """
import sys, torch
from lssar import MECHANISMS, attend, attention_weights, get_mechanism
from lssar.backends import used_backend
import lssar

assert lssar.__file__.startswith(sys.argv[1]), lssar.__file__
q, k, v = torch.randn(3, 1, 2, 19, 8).unbind()
for name in MECHANISMS:
    out = attend(q, k, v, name)
    assert torch.allclose(out, attention_weights(q, k, name) @ v, atol=1e-4), name
assert attend(q, k, v, get_mechanism("lssar", p=3)).shape == v.shape
files = {name: getattr(m, "__file__", None) or "" for name, m in sys.modules.items()}
ours = [n for n, f in files.items() if f.startswith(sys.argv[2]) and "site-packages" not in f]
print(lssar.__version__, used_backend(MECHANISMS["lssar"]), ours)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy what git tracks, as a repository of its own."""
    folder = tmp_path_factory.mktemp("source") / "a clone"
    for path in tracked(*CLONED):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return folder


def install(what, target):
    command = [*PIP, "install", *OFFLINE, "--target", str(target), what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def use(site, folder, program=PROGRAM, **variables):
    """Run a program in `folder` with the library installed in `site`, the repository unknown."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-c", program, str(site), str(ROOT / "")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    install(str(source), site)
    return site


def test_a_folder_a_wheel_and_a_git_address_install_the_same(source, installed, tmp_path):
    wheels, from_git = tmp_path / "wheels", tmp_path / "from git"
    command = [*PIP, "wheel", *OFFLINE, "-w", str(wheels), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = wheels.glob("lssar-*-py3-none-any.whl")
    assert wheel.name.startswith(f"lssar-{lssar.__version__}-")
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("lssar/")}
    assert {"lssar/lssar_cpu.cpp", "lssar/py.typed", "lssar/hf/models.py"} <= inside
    install(f"git+{source.as_uri()}", from_git)
    for site in (installed, from_git):
        found = {f"lssar/{f.relative_to(site / 'lssar')}" for f in (site / "lssar").rglob("*.*")}
        assert {n for n in found if "__pycache__" not in n} == inside
        done = use(site, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{lssar.__version__} cpu []\n"


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="no wheel")
def test_a_wheel_with_kernels_needs_no_compiler_and_no_cache(source, tmp_path):
    command = [*PIP, "wheel", *OFFLINE, "-w", str(tmp_path), str(source)]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"LSSAR_KERNELS": "1"}
    )
    (wheel,) = tmp_path.glob("lssar-*-py3-none-linux_x86_64.whl")
    site = tmp_path / "site"
    install(str(wheel), site)
    assert {f.name for f in site.glob("lssar/*.so")} == {
        f"lssar_cpu-{variant}.so" for variant in cpu_build.SHIPPED
    }
    cache = tmp_path / "cache"
    done = use(site, tmp_path, PATH=str(tmp_path), CXX="", LSSAR_CACHE=str(cache))
    assert (done.stdout, done.stderr) == (f"{lssar.__version__} cpu []\n", "")
    assert not cache.exists()


def test_a_project_with_modules_of_our_names_is_not_disturbed(installed, tmp_path):
    for name in ("model", "config", "errors", "attention", "distributed", "data"):
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    for name in ("kernels", "integrations"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
    names = "model, config, errors, attention, kernels, distributed, data, integrations"
    program = f"import {names}\n{PROGRAM}\nassert kernels.MINE == 'kernels'\nimport {names}\n"
    program += f"assert all(m.__file__.startswith({str(tmp_path)!r}) for m in ({names}))\n"
    done = use(installed, tmp_path, program)
    assert done.returncode == 0, done.stderr


def test_the_root_on_the_path_hides_no_package_of_others():
    """dask's `distributed`, Hugging Face's `kernels` and the like, for who runs commands here."""
    taken = ("distributed", "kernels", "errors", "integrations", "config", "utils", "transformers")
    found = [n for n in taken if (ROOT / n).exists() or (ROOT / f"{n}.py").exists()]
    assert found == []


def test_the_kernels_package_of_hugging_face_and_ours_work_together(installed, tmp_path):
    program = """
import kernels, lssar.hf
from transformers import AutoModelForCausalLM, LlamaConfig
import torch

assert callable(kernels.get_kernel)
size = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
config = LlamaConfig(vocab_size=64, num_key_value_heads=1, **size)
model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
loss = model(torch.arange(24).view(1, 24), labels=torch.arange(24).view(1, 24)).loss
loss.backward()
assert loss.isfinite()
"""
    done = use(installed, tmp_path, program, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


HARNESS = """
import sys
{imports}
try:
    lm_eval.simple_evaluate(model="lssar", model_args="checkpoint=a", tasks=["a"])
except lssar.errors.UserError as error:
    print(error)
print(*lm_eval.api.registry.model_registry.keys())
"""


def test_the_harness_knows_the_model_in_any_order_of_imports(installed, tmp_path):
    pytest.importorskip("accelerate", reason="pip install -r requirements-downstream.txt")
    for imports in ("import lssar.lm_eval, lm_eval", "import lm_eval, lssar.lm_eval"):
        done = use(installed, tmp_path, HARNESS.format(imports=imports), HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert "--model lssar needs pretrained=FOLDER, and was given checkpoint=a" in done.stdout
        assert {"hf", "vllm", "lssar"} <= set(done.stdout.splitlines()[-1].split())


def test_the_installed_command_of_the_harness_knows_the_model(installed, tmp_path):
    pytest.importorskip("accelerate", reason="pip install -r requirements-downstream.txt")
    (tmp_path / "a.yaml").write_text("task: a\ndataset_path: json\noutput_type: loglikelihood\n")
    arguments = ["--model", "lssar", "--model_args", "checkpoint=a", "--tasks", "a.yaml"]
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [str(installed / "bin/lssar-lm-eval"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "--model lssar needs pretrained=FOLDER, and was given checkpoint=a" in done.stderr


def test_importing_torch_imports_nothing_of_ours(installed, tmp_path):
    program = "import sys, torch; print(*(m for m in sys.modules if m.startswith('lssar')))"
    assert use(installed, tmp_path, program).stdout == "\n"


def test_a_clone_works_after_it_was_installed_elsewhere(source, installed):
    """What the build leaves in the clone changes no import there, and git does not see it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "examples/own_model.py"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lssar: loss ")
    status = ["git", "-C", str(source), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True).stdout == ""


def test_without_a_compiler_there_is_one_line_and_the_right_result(installed, tmp_path):
    done = use(installed, tmp_path, PATH=str(tmp_path), CXX="", LSSAR_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "attention runs without" in line and "no C++ compiler found" in line
    assert done.stdout == f"{lssar.__version__} eager []\n"


def test_importing_the_library_is_light(installed, tmp_path):
    program = "import sys, lssar; lssar.__version__; assert 'torch' not in sys.modules\n"
    program += "from lssar import MECHANISMS; assert 'torch' not in sys.modules\n"
    program += "from lssar import attend\n"
    program += "assert not {'triton', 'transformers', 'torch._dynamo'} & set(sys.modules)"
    done = use(installed, tmp_path, program)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists_and_is_annotated():
    for name in lssar.__all__:
        value = getattr(lssar, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, (name, parameter)
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        lssar.atend  # noqa: B018


def test_the_type_checker_has_nothing_to_say():
    command = [sys.executable, "-m", "mypy", "lssar"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
