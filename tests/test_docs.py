"""README and docs: every link leads somewhere, every command exists and knows its options."""

import json
import re
import shlex
from pathlib import Path

from checkout import ROOT, help_of, tracked

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


def blocks(page: Path) -> list[str]:
    """Return the commands of a page's bash blocks, or those that a notebook gives to the shell."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return BLOCK.findall(text)
    cells = json.loads(text)["cells"]
    return ["".join(re.findall(r"^\s*!(.*\n?)", "".join(c["source"]), re.M)) for c in cells]


def commands() -> list[tuple[str, list[str]]]:
    """Return (page, words) of every command; continued lines are joined."""
    found = []
    for page in [*PAGES, *tracked("examples/*.ipynb")]:
        for block in blocks(page):
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
