"""Requests of a file: both forms of lines, errors of lines, and a run that was killed."""

import fcntl
import json
import signal
import subprocess
import sys

import pytest
from benchmarks.serving import make_model, make_parser

from headwater.cli.main import main
from headwater.data.codec import Codec
from headwater.serving import service


def card(text, **params):
    return {"input_data": [text], "params": {"max_new_tokens": 6, "return_full_text": True, **params}}


def openai_line(name, prompt, **body):
    body = {"model": "small", "prompt": prompt, "max_tokens": 6, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def write(path, lines):
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folders, requests, *words):
    return main(["batch", str(requests), f"small={folders['small']}", *map(str, words)])


def test_lines_of_both_forms_are_answered_in_their_order(folders, tmp_path, capsys):
    lines = [card("The mill"), openai_line("a", "The mill"), openai_line("b", "river", n=2, temperature=1)]
    requests = write(tmp_path / "requests.jsonl", lines)
    assert run(folders, requests) == 0
    texts, first, second = read(tmp_path / "requests.answers.jsonl")
    completion = first["response"]["body"]
    assert texts == ["The mill" + completion["choices"][0]["text"]]
    assert [each["custom_id"] for each in (first, second)] == ["a", "b"]
    assert first["response"]["status_code"] == 200
    assert first["error"] is None
    assert len(second["response"]["body"]["choices"]) == 2
    assert "requests.answers.jsonl" in capsys.readouterr().out


def test_lines_that_cannot_be_answered_get_an_error_and_the_others_an_answer(folders, tmp_path):
    bad = openai_line("long", "mill " * 200)
    lines = ["{\n", {"input_data": "text"}, bad, {**bad, "url": "/v1/none"}, {"url": 3}, card("The")]
    requests = write(tmp_path / "requests.jsonl", lines)
    assert run(folders, requests, "--output", tmp_path / "out.jsonl") == 1
    answers = read(tmp_path / "out.jsonl")
    assert "JSON object" in answers[0]["error"]["message"]
    assert "input_data" in answers[1]["error"]["message"]
    assert answers[2]["response"]["status_code"] == 400
    assert "shorten the prompt" in answers[2]["error"]["message"]
    assert answers[3]["response"]["status_code"] == 404
    assert answers[4]["response"]["status_code"] == 400
    assert isinstance(answers[5][0], str)


def test_lines_wait_for_a_full_queue(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_MOST_WAITING", 4)
    lines = [openai_line(str(number), "The mill", n=4, temperature=1) for number in range(12)]
    requests = write(tmp_path / "requests.jsonl", lines)
    assert run(folders, requests, "--batch_size", "1") == 0
    answers = read(tmp_path / "requests.answers.jsonl")
    assert [len(each["response"]["body"]["choices"]) for each in answers] == [4] * 12


def test_a_line_whose_answer_fails_does_not_stop_the_others(folders, tmp_path, monkeypatch):
    encode = Codec.encode

    def failing(self, text):
        if text == "fails":
            raise OverflowError("too large")
        return encode(self, text)

    monkeypatch.setattr(Codec, "encode", failing)
    lines = [openai_line("a", "fails"), openai_line("b", "The mill")]
    requests = write(tmp_path / "requests.jsonl", lines)
    assert run(folders, requests) == 1
    first, second = read(tmp_path / "requests.answers.jsonl")
    assert first["response"]["status_code"] == 500
    assert "too large" in first["error"]["message"]
    assert second["response"]["status_code"] == 200


def test_the_length_of_texts_is_limited(folders, tmp_path):
    requests = write(tmp_path / "requests.jsonl", [card("The", max_new_tokens=60)])
    assert run(folders, requests, "--max_sequence_length", "32") == 1
    (answer,) = read(tmp_path / "requests.answers.jsonl")
    assert "the 32 positions" in answer["error"]["message"]


def test_errors_of_an_earlier_run_count(folders, tmp_path):
    requests = write(tmp_path / "requests.jsonl", ["{\n", openai_line("a", "mill " * 200), card("The")])
    assert [run(folders, requests) for _ in range(2)] == [1, 1]


def test_answers_of_another_model_are_kept(folders, tmp_path, capsys):
    requests = write(tmp_path / "requests.jsonl", [card("The")])
    assert run(folders, requests) == 0
    before = (tmp_path / "requests.answers.jsonl").read_bytes()
    assert main(["batch", str(requests), f"small={folders['long']}"]) == 2
    assert "of other models" in capsys.readouterr().err
    assert (tmp_path / "requests.answers.jsonl").read_bytes() == before


def test_answers_that_another_process_writes_are_kept(folders, tmp_path, capsys):
    requests, output = write(tmp_path / "requests.jsonl", [card("The")]), tmp_path / "out.jsonl"
    with output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(folders, requests, "--output", output) == 2
    assert "another process is writing" in capsys.readouterr().err
    assert output.read_bytes() == b""


def test_the_benchmark_makes_a_model(tmp_path):
    args = make_parser().parse_args(["fuzz", "--hidden_size", "64", "--layers", "1"])
    folder = make_model(args, tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in folder.iterdir()}


KILLED = """
import itertools, os, signal, sys
from headwater.cli.main import main
counts, fsync = itertools.count(1), os.fsync
def fsync_or_end(file):
    if os.readlink(f"/proc/self/fd/{file}").endswith("out.jsonl") and next(counts) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = fsync_or_end
main(sys.argv[1:])
"""
"""A command that kills itself when it has written five answers."""


def test_a_killed_run_continues_without_answering_a_line_twice(folders, tmp_path):
    lines = [card(f"The mill {number}", max_new_tokens=60) for number in range(60)]
    requests, output = write(tmp_path / "requests.jsonl", lines), tmp_path / "out.jsonl"
    words = ["batch", requests, folders["small"], "--output", output, "--batch_size", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)])
    assert killed.returncode == -signal.SIGKILL
    with output.open("ab") as file:
        file.write(b'["an answer that was not fin')
    before = output.read_bytes().splitlines()[:-1]
    assert len(before) == 5
    assert main(list(map(str, words))) == 0
    assert output.read_bytes().splitlines()[: len(before)] == before
    answers = read(output)
    assert len(answers) == 60
    assert all(text.startswith(f"The mill {number}") for number, (text,) in enumerate(answers))
    whole = tmp_path / "whole.jsonl"
    assert run(folders, requests, "--output", whole) == 0
    assert read(whole) == answers


def test_answers_to_other_requests_are_kept(folders, tmp_path, capsys):
    requests, output = write(tmp_path / "requests.jsonl", [card("The")]), tmp_path / "out.jsonl"
    assert run(folders, requests, "--output", output) == 0
    before = output.read_bytes()
    write(requests, [card("Another")])
    assert run(folders, requests, "--output", output) == 2
    assert "answers to other requests" in capsys.readouterr().err
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", ["none.jsonl", "."])
def test_requests_that_cannot_be_read(folders, tmp_path, capsys, name):
    assert run(folders, tmp_path / name, "--output", tmp_path / "out.jsonl") == 2
    assert "the requests cannot be read" in capsys.readouterr().err
