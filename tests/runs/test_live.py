"""The live server: only its own paths, only its own name, only on loopback, and never many connections."""

import fcntl
import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.html_pages import Page, data_of
from helpers.run_folders import RECIPE, eval_row, start, train_row, write_run
from vitpar.errors import LaunchError
from vitpar.runs import live
from vitpar.runs.live import LiveReport


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "mine", [train_row(1)])


@pytest.fixture
def server(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveReport]:
    monkeypatch.setattr(live, "REST", 0.0)
    with LiveReport([run], 0, "vitpar report mine") as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: LiveReport, method: str = "GET", path: str = "/", host: str | None = None) -> tuple[int, str]:
    """Return the status and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_follows_the_run(server: LiveReport, run: Path) -> None:
    status, html = asked(server)
    version = asked(server, path="/version")[1]
    assert status == 200 and Page(html).all("html")[0]["data-version"] == version
    assert asked(server, path="/version")[1] == version, "nothing changed"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_row(2)) + "\n")
    assert asked(server, path="/version")[1] != version
    assert "steps 2 of 60" in Page(asked(server)[1]).text


def test_only_its_own_paths_methods_and_host_names_are_answered(server: LiveReport, run: Path) -> None:
    """A page of a stranger could reach 127.0.0.1 by a name of its own."""
    assert server.server_address[0] == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.server_port}/"
    for path in ("/metrics.jsonl", "//x", "/../etc/passwd", "/version/", "/?x", "/index.html", "http://other/"):
        assert asked(server, path=path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert asked(server, method)[0] == 501, method
    assert asked(server, "HEAD") == (200, "")
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
        status, text = asked(server, host=host)
        assert status == 403 and "<" not in text, host
    assert asked(server, host=f"localhost:{server.server_port}")[0] == 200
    with pytest.raises(LaunchError, match=f"cannot listen on port {server.server_port}: .* --port"):
        LiveReport([run], server.server_port)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    status, text = asked(server)
    assert status == 503 and text.startswith("cannot read") and text.count("\n") == 1


@pytest.fixture
def boarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveReport]:
    monkeypatch.setattr(live, "REST", 0.0)
    for seed, name in enumerate(("a & b", "c", "d")):
        run = write_run(tmp_path / "runs" / name, [train_row(1), eval_row(1, top1=0.5 + seed / 10)])
        (run / "recipe.toml").write_text(f"{RECIPE.format(steps=60)}seed = {seed % 2}\n")
    write_run(tmp_path / "secret", [train_row(1)])
    with LiveReport(tmp_path / "runs", 0) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_board_has_all_runs_of_its_folder_and_leads_to_no_others(boarded: LiveReport, tmp_path: Path) -> None:
    status, html = asked(boarded)
    page = Page(html)
    links = [link["href"] for link in page.all("a")]
    assert status == 200 and sorted(links[:3]) == ["/?run=a+%26+b", "/?run=c", "/?run=d"]
    assert "0, 0, 1 loss 2 ± 0 top-1 60.0 % ± 10.0 %" in page.text, "runs that differ in their seed alone"
    before = asked(boarded, path="/version")[1]
    write_run(tmp_path / "runs" / "new", [train_row(1)])
    write_run(tmp_path / "runs" / os.fsdecode(b"b\xe4r"), [train_row(1)])  # a name that is not UTF-8
    assert asked(boarded, path="/version")[1] != before and "/?run=new" in asked(boarded)[1]
    status, html = asked(boarded, path="/?run=a+%26+b&run=c")
    assert status == 200 and "2 runs" in Page(html).text and "train.seed 0 1" in Page(html).text
    assert "mean ± deviation of seeds" in Page(html).text and data_of(html)["seeds"] == [[0, 1]]
    for query in ("run=..%2Fsecret", "run=../secret", "run=secret", "run=", "x=1", "run=c&" * 20, "run=%ff", "&" * 99):
        assert asked(boarded, path=f"/?{query}")[0] == 404, query


def test_the_end_of_a_killed_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REST", 0.0)
    run = write_run(tmp_path / "mine", [train_row(1)], events=[start("dp2", 60)])
    with (run / "log.txt").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with LiveReport([run], 0) as server:
            running = server.page()
            assert server.page() == running and "running" in Page(running[0].decode()).text
            fcntl.flock(held, fcntl.LOCK_UN)
            page, version = server.page()
    assert version != running[1] and "was it killed?" in Page(page.decode()).text
