"""README and docs: every link leads somewhere, every command exists and knows its options."""

import re
import shlex

from checkout import ROOT, help_of, tracked

from physics.config import OrbitConfig
from training.config import Config, load_config
from training.estimate import estimate, gpu_hours, planned_backends

PAGES = tracked("README.md", "CONTRIBUTING.md", "docs/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
WITH_SUBCOMMANDS = ("data/prepare.py", "benchmark.py")
OVERRIDE = re.compile(r"--[a-z]+\.[a-z_0-9]+=")  # a key of a config


def test_links_lead_somewhere():
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_bytes()) <= 9000


def test_a_page_begins_with_what_to_run_and_is_at_most_two_pages():
    written_by_commands = ("hf_support.md", "reliability.md")
    for page in tracked("docs/*.md"):
        if page.name in written_by_commands:
            continue
        title, blank, fence, *_ = page.read_text(encoding="utf-8").splitlines()
        assert title.startswith("# ") and not blank, page.name
        assert fence in ("```bash", "```python"), f"{page.name} begins with {fence!r}"
        assert len(page.read_bytes()) <= 6500, page.name


def test_hours_in_the_headers_of_configs_are_those_of_the_dry_run():
    checked = 0
    for path in tracked("configs/*.toml"):
        header = path.read_text(encoding="utf-8").partition("\n\n")[0]
        stated = re.search(r"([\d.]+) A100-hours", header)
        if stated is None:
            continue
        kind = OrbitConfig if path.name.startswith("physics") else Config
        config = load_config(str(path), [], kind=kind)
        if config.train.micro_batch == "auto":
            config = config.with_micro_batch(1)
        hours = gpu_hours(estimate(config, planned_backends(config, "cuda")).flops)
        decimals = len(stated[1].partition(".")[2])
        assert stated[1] == f"{hours:.{decimals}f}", path.name
        checked += 1
    assert checked > 5


def commands() -> list[tuple[str, list[str]]]:
    """Return (page, words) of every command in a bash block; continued lines are joined."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words:
                    found.append((page.name, words))
    return found


def test_commands_exist_and_know_their_options():
    checked = 0
    for page, words in commands():
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        if words[0] not in ("python", "bash", "torchrun", "sbatch") or not scripts:
            continue
        script = scripts[0]
        line = f"{page}: {' '.join(words)}"
        assert (ROOT / script).is_file(), line
        for config in (word for word in words if word.startswith("configs/")):
            assert (ROOT / config).is_file(), line
        if script.endswith(".sh"):
            continue
        arguments = words[words.index(script) + 1 :]
        command = [script, *arguments[: script in WITH_SUBCOMMANDS]]
        for word in arguments:
            if word.startswith("--") and not OVERRIDE.match(word):
                option = word.split("=")[0]
                assert option in help_of(*command), f"{line}: {option} is not in its --help"
                checked += 1
    assert checked > 20
