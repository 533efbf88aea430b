from __future__ import annotations

from benchmarks.closed_loop import Phases, parse

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: 44\r\n"
    b'Content-Length: 52\r\n\r\n{"parameters":{"weights_generation":1234 }}!\0\1\2\3\4\5\6\7'
)
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"


def test_an_answer_is_parsed_when_its_last_byte_is_there() -> None:
    assert [parse(ANSWER[:end]) for end in range(len(ANSWER))] == [None] * len(ANSWER)
    assert parse(ANSWER) == (1234, bytes(range(8)))


def test_a_refusal_is_its_own_text() -> None:
    assert parse(REFUSAL[:-1]) is None
    assert parse(REFUSAL) == REFUSAL


def test_moments_belong_to_phases() -> None:
    phases = Phases(begin_s=10.0, each_s=0.5, count=4)
    assert [phases.at(moment) for moment in (9.9, 10.0, 10.49, 10.5, 12.0)] == [-1, 0, 0, 1, 4]
    assert phases.start_s(4) == 12.0
