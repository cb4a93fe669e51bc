"""The user-mode kernel of the test bed: which sources, how it is built, and what can go wrong."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.vm import __main__ as command_line
from tests.vm import cache, machine, packages, uml
from tests.vm.kernel import Kernel
from tests.vm.report import TestBedError

SOURCE = uml.Source("7.3", "7.3.4-1")
COMPLETE = "".join(
    f"CONFIG_{option}=y\n"
    for option in ("HOSTFS", "OVERLAY_FS", "RDMA_RXE", "RDMA_SIW", "INFINIBAND_ADDR_TRANS")
)

# What answers for `make ARCH=um`: the configuration, then a kernel.
MAKEFILE = """
allnoconfig:
	cp $(KCONFIG_ALLCONFIG) asked
	cp complete .config
vmlinux:
	@echo '  CC      one.o'
	mkdir -p include/config
	echo 7.3.4 >include/config/kernel.release
	echo "$(ARCH) kernel" >vmlinux
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("VM_BACKPORTS", "VM_KERNEL", "VM_UML"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def apt_that_has(folder: Path, own: dict[str, str], backports: dict[str, str] | None) -> None:
    """Programs that answer like apt's; None: the archive has no backports."""

    def answers(offered: dict[str, str]) -> str:
        names = "; ".join(f"echo {name} - text" for name in offered) or ":"
        lines = [f"search*) {names};;"]
        lines += [f"policy*{name}) echo '  Candidate: {offered[name]}';;" for name in offered]
        return "\n".join(lines)

    script = f"""
case "$*" in
    *sourcelist*) words="$*"; words=${{words#*Sandbox::User= }}
        case "$words" in {answers(backports or {})} esac;;
    *) case "$*" in {answers(own)} esac;;
esac"""
    program(folder, "apt-cache", script)
    status = 100 if backports is None else 0
    program(
        folder,
        "apt-get",
        f'case "$*" in indextargets*) echo http://archive.example/debian/;;'
        f" *update) echo 'E: no Release file'; exit {status};; esac",
    )


def test_newest_source_is_taken(programs: Path) -> None:
    apt_that_has(
        programs,
        {"linux-source-6.1": "6.1.9-1"},
        {"linux-source-7.3": "2", "linux-source-7.10": "3"},
    )
    assert uml.find("") == uml.Source("7.10", "3", backports=True)


def test_backports_are_asked_where_apt_has_debian(programs: Path, tmp_path: Path) -> None:
    apt_that_has(programs, {}, {"linux-source-7.3": "2"})
    uml.find("")
    (line,) = (tmp_path / "cache/aiordma/backports/sources.list").read_text().splitlines()
    assert line.split()[2:] == ["http://archive.example/debian/", packages.BACKPORTS, "main"]


def test_named_series_is_taken(programs: Path) -> None:
    apt_that_has(programs, {"linux-source-6.1": "6.1.9-1"}, {"linux-source-7.3": "2"})
    assert uml.find("6.1") == uml.Source("6.1", "6.1.9-1")
    assert uml.find("7.3") == uml.Source("7.3", "2", backports=True)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the unpacked sources."""
    tree = tmp_path / "linux-source-7.3"
    (tree / uml.CLOCK_FILE).parent.mkdir(parents=True)
    (tree / uml.CLOCK_FILE).write_text("first\n")
    (tree / "complete").write_text(COMPLETE + "CONFIG_SMP=y\n")
    (tree / "Makefile").write_text(MAKEFILE)
    monkeypatch.setattr(packages, "ensure", lambda wanted: None)
    monkeypatch.setattr(uml, "unpack", lambda source, work: tree)
    return tree


def test_kernel_is_built_once_and_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uml, "find", lambda choice: SOURCE)
    built = uml.prepare("")
    assert built.image.read_text() == "um kernel\n"
    assert (built.release, built.version) == ("7.3.4", "7.3.4-1")
    assert (sources / "asked").read_text() == uml.CONFIG.read_text()
    assert (sources / uml.CLOCK_FILE).read_text() == "first\n" + uml.CLOCK
    (sources / "Makefile").unlink()
    monkeypatch.setattr(uml, "find", lambda choice: pytest.fail("asked again"))
    assert uml.prepare("") == built


def test_another_configuration_is_another_kernel(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uml, "find", lambda choice: SOURCE)
    first = uml.prepare("")
    (tmp_path / "config").write_text("CONFIG_OTHER=y\n")
    monkeypatch.setattr(uml, "CONFIG", tmp_path / "config")
    assert uml.prepare("").directory != first.directory


@pytest.mark.parametrize("option", ["RDMA_RXE", "HOSTFS"])
def test_source_without_a_needed_option_is_refused(sources: Path, option: str) -> None:
    (sources / "complete").write_text(COMPLETE.replace(f"CONFIG_{option}=y\n", ""))
    with pytest.raises(TestBedError, match=f"CONFIG_{option}"):
        uml.build(SOURCE, sources)


def test_only_what_is_compiled_is_unpacked() -> None:
    for path in ("arch/um/Kconfig", "arch/x86/um/a.S", "arch/arm/Kconfig", "net/core/dev.c"):
        assert uml.is_wanted("linux-source-7.3/" + path)
    for path in ("arch/arm/kernel/head.S", "sound/core/pcm.c", "drivers/gpu/drm/a.c"):
        assert not uml.is_wanted("linux-source-7.3/" + path)


def built(folder: Path, config: str) -> Kernel:
    (folder / "config").write_text(config)
    return Kernel("7.3.4", "7.3.4-1", folder)


@pytest.mark.parametrize(("config", "several"), [("CONFIG_SMP=y\n", True), ("", False)])
def test_processors_are_given_to_a_kernel_that_can_have_them(
    tmp_path: Path, config: str, several: bool
) -> None:
    guest = uml.Guest(built(tmp_path, config), tmp_path / "cpio", tmp_path, 7, "2", "512")
    words = guest.command_line()
    assert ("ncpus=2" in words) is several
    assert {"mem=512M", f"bed_folder={tmp_path}", "con1=null,fd:7", "seccomp=on"} <= set(words)
    assert ("2 processors" in uml.describe(guest.built, "2")) is several


def test_user_s_arguments_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VM_UML", "seccomp=off ncpus=1")
    guest = uml.Guest(built(tmp_path, ""), tmp_path / "cpio", tmp_path, 7)
    assert guest.command_line()[-2:] == ["seccomp=off", "ncpus=1"]


@pytest.mark.parametrize(("free", "is_shared"), [(1 << 40, True), (64 << 20, False)])
def test_memory_is_shared_memory_where_that_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_shared: bool
) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    guest = uml.Guest(built(tmp_path, ""), tmp_path / "cpio", tmp_path, 7)
    assert (guest.environment()["TMPDIR"] == "/dev/shm") is is_shared


def test_bed_is_qemu_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BED", raising=False)
    assert command_line.request("true").bed == "qemu"


def test_guest_s_settings_name_its_bed_and_no_modules(tmp_path: Path) -> None:
    bed = machine.Bed("uml", "user-mode Linux 7.3.4", lambda control, output: pytest.fail("ran"))
    machine.fill(tmp_path, machine.Request("true", project=Path("/nowhere")), bed)
    settings = (tmp_path / "settings").read_text().splitlines()
    assert {"bed=uml", "modules=''", "siw_module=''"} <= set(settings)
    assert "export AIORDMA_VM='user-mode Linux 7.3.4'" in (tmp_path / "environment").read_text()


def test_default_source_is_kept_as_json(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uml, "find", lambda choice: SOURCE)
    uml.prepare("6.1")
    assert not (cache.root() / "uml" / "default").exists()
    uml.prepare("apt")
    kept = json.loads((cache.root() / "uml" / "default").read_text())
    assert uml.Source(**kept) == SOURCE
    assert os.listdir(cache.root() / "uml")
