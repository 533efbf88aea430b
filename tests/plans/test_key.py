from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebind.plans.key import code_features, package_version, plan_key, target_parts

Parts = st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), max_size=4)


def test_key_is_the_same_in_every_release() -> None:
    assert plan_key({"graph": "abc", "engine": "aot_inductor 2.13.0"}) == "c5d877f22b9422ce6162ea9fd21eca63"


def test_key_is_hexadecimal_and_has_32_digits() -> None:
    key = plan_key({})
    assert len(key) == 32
    assert int(key, 16) >= 0


def test_order_of_parts_is_irrelevant() -> None:
    assert plan_key({"a": "1", "b": "2"}) == plan_key({"b": "2", "a": "1"})


@pytest.mark.parametrize(
    "other", [{"ab": "c"}, {"a": "bc", "": ""}, {"": "abc"}, {"a": "b", "c": ""}, {"abc": ""}, {"a": "BC"}]
)
def test_text_that_moves_between_parts_changes_the_key(other: dict[str, str]) -> None:
    assert plan_key(other) != plan_key({"a": "bc"})


@given(Parts, Parts)
def test_keys_are_equal_only_for_equal_parts(first: dict[str, str], second: dict[str, str]) -> None:
    assert (plan_key(first) == plan_key(second)) == (first == second)


def test_version_of_a_package_is_that_of_the_module() -> None:
    assert package_version("numpy") == np.__version__


def test_features_that_change_no_code_are_left_out() -> None:
    x86 = "flags\t\t: fpu vme sse2 pni ssse3 avx2 avx512f avx512_vnni avx_vnni amx_tile fma hypervisor smep sme\n"
    features = ("amx_tile", "avx2", "avx512_vnni", "avx512f", "avx_vnni", "fma", "pni", "sse2", "ssse3")
    assert code_features(f"processor\t: 0\n{x86}bugs\t\t: spectre_v1\n") == features


def test_features_of_arm_are_read() -> None:
    arm = "Features\t: fp asimd evtstrm aes crc32 atomics asimddp sve i8mm bf16 cpuid\n"
    assert code_features(f"processor\t: 0\n{arm}CPU part\t: 0xd40\n") == (
        "asimd",
        "asimddp",
        "atomics",
        "bf16",
        "fp",
        "i8mm",
        "sve",
    )


def test_only_features_of_all_processors_count() -> None:
    assert code_features("flags : avx2 avx512f\n\nflags : avx2 sse2\n") == ("avx2",)


def test_no_features_are_no_error() -> None:
    assert code_features("processor : 0\nhart : 0\n") == ()


def test_target_names_this_machine_and_is_the_same_in_another_process() -> None:
    parts = target_parts()
    assert parts["machine"] == platform.machine()
    assert parts["libc"]
    script = "from rebind.plans.key import plan_key, target_parts; print(plan_key(target_parts()))"
    elsewhere = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert elsewhere.stdout.strip() == plan_key(parts)
