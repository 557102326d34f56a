"""The wheel holds every file of the package, and its page on an index has no dead link."""

import email
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, opened."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_tracked_file_of_the_package(wheel):
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected <= held
    assert all(name.startswith("headwater/") for name in held)


def test_every_link_of_the_package_page_is_absolute(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    page = metadata.get_payload()
    assert "# Headwater" in page and "Quickstart" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert all(link.startswith("https://") for link in links), links
    assert metadata["Author"] and metadata["Keywords"]
    assert "Programming Language :: Python :: 3.12" in metadata.get_all("Classifier")
