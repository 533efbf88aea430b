from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rebind.config.pbtxt import MAX_BYTES, parse_pbtxt, read_pbtxt, to_pbtxt
from rebind.errors import ConfigInvalid
from tests.config.strategies import messages

if TYPE_CHECKING:
    from pathlib import Path

    from rebind.config.schema import ConfigMessage


def refused(content: str | bytes) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        parse_pbtxt(content, "m/config.pbtxt")
    return str(caught.value)


def test_reads_what_people_write() -> None:
    message = parse_pbtxt(
        """
        # comments, both kinds of message syntax, both kinds of quotes
        name: "m"  max_batch_size: 8
        input [ { name: 'x', data_type: TYPE_FP32, dims: [ 3, -1 ] } , { name: "y" data_type: TYPE_STRING dims: 1 } ]
        instance_group { count: 2 kind: KIND_CPU };
        parameters: { key: "A" value: { string_value: "b" } }
        dynamic_batching {}
        """,
        "m",
    )
    assert (message.name, message.max_batch_size) == ("m", 8)
    assert [list(tensor.dims) for tensor in message.input] == [[3, -1], [1]]
    assert message.parameters["A"].string_value == "b"
    assert message.HasField("dynamic_batching")


def test_empty_file_is_an_empty_configuration() -> None:
    assert to_pbtxt(parse_pbtxt("", "m")) == ""


def test_a_byte_order_mark_is_no_error() -> None:
    assert parse_pbtxt(b"\xef\xbb\xbfmax_batch_size: 3", "m").max_batch_size == 3


def test_unfilled_placeholder_is_named_with_file_line_and_column() -> None:  # case C1
    text = refused('name: "m"\n  max_batch_size: ${batch}\n')
    assert text.startswith("m/config.pbtxt:2:19: ")
    assert "${batch} looks like an unfilled placeholder" in text


@pytest.mark.parametrize(
    "line",
    ['optimization { eager_batching: "${flag}" }', "max_batch_size: $SIZE", "max_batch_size: {{ size }}", "${rest}"],
)
def test_other_forms_of_placeholders(line: str) -> None:
    assert "looks like an unfilled placeholder" in refused(line)


def test_a_placeholder_elsewhere_on_the_line_is_not_blamed() -> None:
    assert "placeholder" not in refused('parameters { key: "${k}" value { string_value: 3 } }')


def test_a_placeholder_in_a_string_is_a_string() -> None:
    assert parse_pbtxt('name: "${name}"', "m").name == "${name}"


@pytest.mark.parametrize(
    ("content", "position", "said"),
    [
        (
            'name: "m"\nmax_batch_sise: 3',
            "2:1",
            'unknown field "max_batch_sise" in ModelConfig; did you mean "max_batch_size"?',
        ),
        ('input {\n  naem: "x"\n}', "2:3", 'unknown field "naem" in ModelInput; did you mean "name"?'),
        ("zzz: 3", "1:1", 'unknown field "zzz" in ModelConfig; its fields are name, platform, backend'),
        ("version_policy { all { x: 1 } }", "1:24", 'unknown field "x" in All; its fields are none'),
        (
            "input { data_type: TYPE_FLOAT32 }",
            "1:20",
            "unknown value TYPE_FLOAT32 of DataType; did you mean TYPE_FP32?",
        ),
        ("input { data_type: TYPE_BYTES }", "1:20", "did you mean TYPE_STRING?"),
        ("input { data_type: INT8 }", "1:20", "did you mean TYPE_INT8?"),
        ("instance_group { kind: TPU }", "1:24", "unknown value TPU of Kind"),
        ("max_batch_size: 3 max_batch_size: 4", "1:35", 'should not have multiple "max_batch_size" fields'),
        ("max_batch_size: 99999999999", "1:17", "Value out of range: 99999999999"),
        ("max_batch_size: 1.5", "1:17", "Couldn't parse integer: 1.5"),
        ('max_batch_size: "4"', "1:17", 'Couldn\'t parse integer: "4"'),
        ("name: 3", "1:7", "Expected string but found: '3'"),
        ('name: "abc', "1:7", "String missing ending quote"),
        ('name "m"', "1:6", 'Expected ":"'),
        ('input [ { name: "x" dims: [ 1, 2 ]', "1:34", 'Expected "}"'),
        ("dynamic_batching { } sequence_batching { }", "1:22", 'along with field "dynamic_batching"'),
        ('parameters { key: "K" value: "V" }', "1:30", 'parameters { key: "K" value { string_value: "V" } }'),
        ('parameters { K: "V" }', "1:14", 'parameters { key: "K" value { string_value: "V" } }'),
        ("[ext.name]: 3", "1:", "does not have extensions"),
        (r'name: "\xff"', "1:", "Couldn't parse string"),
        ('name: "a\0b"', "1:9", "NUL byte"),
        (b'name: "m"\nbackend: "\xff"', "2:11", "byte 0xff is not UTF-8; save the file as UTF-8 text"),
        ('name: "m"'.encode("utf-16"), "1:1", "byte 0xff is not UTF-8"),
    ],
)
def test_syntax_errors_say_where_and_what(content: str | bytes, position: str, said: str) -> None:
    text = refused(content)
    assert text.startswith(f"m/config.pbtxt:{position}")
    assert said in text


def test_an_enum_number_without_a_name_is_refused() -> None:
    assert "input.data_type: 99 is no value of DataType" in refused("input { data_type: 99 }")


def test_deep_nesting_is_an_error_at_the_first_unknown_level() -> None:
    assert refused("x { " * 200_000).startswith('m/config.pbtxt:1:1: unknown field "x"')
    assert refused("dims: " + "[" * 200_000).startswith('m/config.pbtxt:1:1: unknown field "dims"')
    assert refused("input { dims: " + "[" * 200_000).startswith("m/config.pbtxt:1:16: ")


def test_a_file_of_ten_megabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"#" * 10_000_000)
    with pytest.raises(ConfigInvalid, match=rf"{path}: longer than {MAX_BYTES} bytes"):
        read_pbtxt(path)


def test_reads_a_file_and_names_it_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text('name: "m"')
    assert read_pbtxt(path).name == "m"
    path.write_text("nam: 3")
    with pytest.raises(ConfigInvalid, match=rf'^{path}:1:1: unknown field "nam"'):
        read_pbtxt(path)


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read: No such file or directory"):
        read_pbtxt(tmp_path / "config.pbtxt")
    with pytest.raises(ConfigInvalid, match="cannot be read: Is a directory"):
        read_pbtxt(tmp_path)


@given(messages())
def test_text_reads_back_the_same(message: ConfigMessage) -> None:
    assert parse_pbtxt(to_pbtxt(message), "m") == message


@given(messages(), st.data())
def test_damaged_text_is_read_or_refused_but_never_breaks(message: ConfigMessage, data: st.DataObject) -> None:
    text = to_pbtxt(message) + 'input { dims: [ 1, -1 ] data_type: TYPE_FP32 } name: "\\n"'
    cut = data.draw(st.integers(0, len(text)))
    insert = data.draw(
        st.one_of(st.binary(max_size=3), st.sampled_from([b"{", b"}", b"[", b'"', b"\\", b"${x}", b"<"]))
    )
    content = text[:cut].encode() + insert + text[cut + data.draw(st.integers(0, 5)) :].encode()
    try:
        parse_pbtxt(content, "m")
    except ConfigInvalid as error:
        assert str(error).startswith("m:")  # noqa: PT017 - most damage is refused, but not all


@given(st.text(max_size=40))
@example("\\")
@example("\r\n\x0b name: 3")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_pbtxt(text, "m")
    except ConfigInvalid as error:
        assert str(error).startswith("m:")  # noqa: PT017 - a comment, for example, is read
