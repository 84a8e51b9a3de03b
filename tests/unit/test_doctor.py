"""What keeps a server from working is told by `stageline doctor` before anything starts, in the words of the start."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.cli.main import main
from stageline.cluster.membership import Membership, Wanted
from stageline.cluster.messages import Declined, Hello, Here, Offer, Ready, Software
from stageline.cluster.probe import Way
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.doctor.devices import Ranks, judge_devices, ranks_of
from stageline.doctor.finding import Finding
from stageline.doctor.joining import Guest, Joining, play_joining
from stageline.doctor.links import Need, judge_link
from stageline.doctor.patient import Asked
from stageline.doctor.peer import Facts
from stageline.doctor.peer import Peer as Listener
from stageline.doctor.peer_findings import Peer, address_of_peer, judge_clock, judge_mtu, why_not_reached
from stageline.errors import ConfigError
from stageline.links.frames import encode_message
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.sockets import Links, bound_address
from stageline.links.tcp_address import TcpAddress
from stageline.pipeline.host_devices import HostDevices
from tests.unit.checkpoint_files import NUM_LAYERS, write_hf_directory

KEY = ClusterKey(bytes(32))
HERE = TcpAddress("127.0.0.1", 0)
CPU = HostDevices("cpu", 4, [2**33], "x86_64")
GPUS = HostDevices("cuda", 4, [2**30, 2**30], "H100")
SOFTWARE = Software(1, "0.1.0", "2.13.0")
WANTED = Wanted(SOFTWARE, {"--dtype": "auto"}, "model.gguf", "d1", num_stages=3, num_nodes=3, own_stages=None)
HELLO = Hello(
    software=SOFTWARE, node_id="a", host_name="a", rank=None, num_stages=None, address="10.0.0.2:5", settings={}
)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose variables say nothing, and whose devices nobody has to load torch for."""
    for name in ("STAGELINE_CLUSTER_KEY", "STAGELINE_CLUSTER_KEY_FILE", "VLLM_PP_LAYER_PARTITION", "STAGELINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stageline.doctor.checkup.ask_devices", lambda _: CPU)
    monkeypatch.setattr("stageline.cluster.probe._REACH_S", 1.0)
    monkeypatch.setattr("stageline.doctor.machine._REACH_S", 1.0)
    monkeypatch.setattr("stageline.cluster.probe._LONG_ENOUGH_S", 0.005)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_hf_directory(tmp_path / "model"))


def look(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Finding]:
    """The last finding of each check, of `where:check` where that is another machine."""
    status = main(["doctor", *words, "--port", "0", "--json"])
    found = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    assert status == (1 if any(one.status == "failed" for one in found) else 0)
    return {f"{one.where}:{one.check}".removeprefix(":"): one for one in found}


# ---- this machine ----


@pytest.mark.parametrize(
    ("flags", "check", "words"),
    [
        (["-pp", "2", "--pp-layer-partition", "1,1,1"], "layers", "has 3 entries for 2 stages"),
        (["-pp", "2", "--pp-layer-partition", "5,5"], "layers", f"sums to 10, but the model has {NUM_LAYERS} layers"),
        (["-pp", "99"], "layers", "every stage needs at least one layer"),
        (["--max-model-len", "99999999"], "model length", "ask for at most"),
        (["--threads-per-stage", "4096"], "settings", "--threads-per-stage is 4096"),
        (["--kv-cache-memory", "much"], "settings", "is not a size"),
        (["--max-queue", "0"], "flags", "--max-queue is 0"),
        (["-pp", "2", "--nnodes", "3", "--master-addr", "127.0.0.1"], "stages", "too few stages|too many stages"),
        (["--nnodes", "2"], "flags", "--master-addr is missing"),
        (["-pp", "2", "--nnodes", "2", "--master-addr", "nohost.invalid"], "head name", "neither an address nor"),
        (["-pp", "2", "--nnodes", "2", "--master-addr", "192.0.2.1", "--insecure"], "head port", "not an address of"),
        (["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"], "key", "there is no cluster key"),
        (["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--cluster-key-file", "/none"], "key", "key new"),
        (["--host", "192.0.2.1", "--insecure"], "API port", "is not an address of this machine"),
        (["--kv-cache-memory", "999TiB"], "memory", "are free after loading"),
        (["--distributed-executor-backend", "ray", "--nnodes", "2"], "ray", "lets Ray choose|is not installed"),
    ],
)
def test_what_a_start_would_refuse_is_told_in_its_words(
    model: str, capsys: pytest.CaptureFixture[str], flags: list[str], check: str, words: str
) -> None:
    found = look(capsys, model, *flags)
    assert found[check].status == "failed", found
    assert re.search(words, found[check].message), found[check]


def test_a_machine_on_which_it_would_start_is_found_healthy_but_for_what_the_model_lacks(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = look(capsys, model, "-pp", "2")
    assert {name for name, one in found.items() if one.status != "ok"} == {"tokenizer"}
    assert found["layers"].message == "2,1 layers on 2 stages"
    assert "KV cache for about" in found["memory"].message


def test_weights_that_cannot_be_opened_are_told_and_nothing_else_depends_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = look(capsys, "/no/such/model.gguf")
    assert "does not exist" in found["weights"].message and "memory" not in found
    assert look(capsys)["weights"].status == "skipped"


def test_a_port_that_is_taken_is_told(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        spread = ["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--insecure"]
        found = look(capsys, model, *spread, "--master-port", port, "--port-range", port)
    assert "is in use" in found["head port"].message
    assert "are all in use" in found["links port"].message


def test_a_node_is_told_why_it_does_not_reach_its_head(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
    flags = ["-pp", "2", "--nnodes", "2", "--node-rank", "1", "--headless", "--insecure"]
    found = look(capsys, model, *flags, "--master-addr", "127.0.0.1", "--master-port", port)
    assert "the connection is refused; is the head started" in found["head"].message
    assert "API port" not in found


@pytest.mark.parametrize("key", [KEY, ClusterKey(bytes([1]) * 32)])
def test_a_node_is_told_whether_a_running_head_takes_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: ClusterKey
) -> None:
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", key.text())
    links = Links(LinkSecurity(KEY))
    head = links.listener(HERE.url)

    def answer() -> None:
        if head.poll(20_000 if key == KEY else 0):
            identity, frame = head.recv_multipart()
            message = msgspec.msgpack.decode(frame, type=Here)
            for _, answer in Membership(WANTED, 0.0).take(identity, message, 0.0):
                head.send_multipart([identity, encode_message(answer)])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        address = TcpAddress.parse(bound_address(head))
        flags = ["-pp", "2", "--nnodes", "2", "--node-rank", "1", "--headless", "--master-addr", address.host]
        found = look(capsys, *flags, "--master-port", str(address.port))["head"]
    finally:
        thread.join()
        links.close()
    assert found.status == ("ok" if key == KEY else "failed"), found
    assert ("takes this key" if key == KEY else "its cluster key is not this one's") in found.message


# ---- devices, memory, links ----


def test_fewer_devices_than_ranks_are_told_and_refused_where_ranks_share_a_layer() -> None:
    assert ranks_of((2, 1, 1), range(2), 1) == Ranks(3, "-tp 2,1 x 2 stages", True)
    assert ranks_of((1, 1), range(2), 2) == Ranks(4, "-dp 2 x 2 stages", False)
    four = ranks_of((2, 2), range(2), 1)
    assert judge_devices(CPU, four, 1).status == "ok"
    assert judge_devices(CPU, four, 2).status == "warning"
    refused = judge_devices(GPUS, four, 1)
    assert refused.status == "failed" and "2 GPUs" in refused.message and "-tp 2 x 2 stages want 4" in refused.message
    assert judge_devices(GPUS, ranks_of((1,) * 4, range(4), 1), 1).status == "warning"


def test_a_link_that_is_slower_than_a_stage_is_told_and_latency_is_not_blamed() -> None:
    need = Need(num_tokens=16, num_bytes=10**6, stage_s=0.01)
    assert judge_link("w", 0.0001, 1e9, need, "b").status == "ok"
    slow = judge_link("w", 0.0001, 1e7, need, "b")
    assert slow.status == "warning" and "takes 100 ms, the slowest stage about 10 ms" in slow.message
    far = judge_link("w", 0.1, 1e9, need, "b")
    assert far.status == "ok" and "more requests at a time" in far.message
    assert "at most 16,000 tokens/s" in judge_link("w", 0.0, 1e9, replace(need, stage_s=None), "b").message


def _peer(**changes: object) -> Peer:
    facts = Facts(hello=HELLO, python="3.11.7", wall_s=0.0, mtu_bytes=9000, cache_bytes=0, devices=CPU)
    return replace(Peer("b", HERE, Way(None, HERE, 0.001, 1e9), facts), **changes)  # type: ignore[arg-type]


def test_clocks_and_mtus_that_differ_are_told_with_both_values() -> None:
    assert judge_clock(_peer(clock_s=1.5, uncertain_s=0.6)).status == "ok"
    wrong = judge_clock(_peer(clock_s=-1.5, uncertain_s=0.1))
    assert wrong.status == "warning" and "-1.500 s" in wrong.message and "NTP" in wrong.message
    assert judge_mtu(9000, _peer()).status == "ok"
    small = judge_mtu(1500, _peer())
    assert small.status == "warning" and "9000 there and 1500 here" in small.message and "mtu 1500" in small.message
    stuck = why_not_reached(HERE, "it answered, and then not for 5 s")
    assert "large ones do not" in stuck and "mtu 1400" in stuck


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1", "127.0.0.1:7"), ("127.0.0.1:9", "127.0.0.1:9"), ("::1", "[::1]:7"), ("[::1]:9", "[::1]:9")],
)
def test_a_peer_is_named_with_or_without_a_port(text: str, address: str) -> None:
    assert str(address_of_peer(text, 7)) == address


@pytest.mark.parametrize("text", ["127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:99999"])
def test_a_peer_with_no_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no port"):
        address_of_peer(text, 7)


# ---- joining ----


def _join(*hellos: Hello, wanted: Wanted = WANTED, answer: Ready | Declined | None = None) -> Joining:
    def ask(_: Offer) -> Ready | Declined:
        return answer or Ready("d1")

    return play_joining(wanted, [Guest(f"g{place}", hello, ask) for place, hello in enumerate(hellos)])


def _changed(**changes: object) -> Hello:
    return msgspec.structs.replace(HELLO, **changes)


def _failures(joining: Joining) -> str:
    return "\n".join(one.line() for one in joining.findings if one.status == "failed")


def test_machines_that_fit_get_the_ranks_and_stages_of_a_start() -> None:
    joining = _join(_changed(node_id="b", rank=2), HELLO)
    assert _failures(joining) == ""
    assert joining.ranks == {"g0": 2, "g1": 1} and joining.shares == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 2}, "--node-rank 2 is taken by node 2"),
        ({"rank": 3}, "--node-rank is 3 on the node, and the head has --nnodes 3"),
        ({"num_stages": 5}, "too few stages|too many stages"),
        ({"software": Software(1, "0.2.0", "2.13.0")}, "stageline is 0.2.0 on the node and 0.1.0 on the head"),
        ({"software": Software(1, "0.1.0", "2.12.0")}, "torch is 2.12.0 on the node and 2.13.0 on the head"),
        ({"settings": {"--dtype": "float32"}}, "--dtype is float32 on the node and auto on the head"),
    ],
)
def test_a_machine_that_does_not_fit_is_told_by_name(changes: dict[str, object], words: str) -> None:
    joining = _join(_changed(node_id="b", rank=2), _changed(**changes))
    [line] = [one for one in joining.findings if one.check == "join" and one.status == "failed"]
    assert line.where == "g1" and re.search(words, line.message), line
    assert "rank 1 missing" in _failures(joining)


def test_another_model_and_missing_machines_are_told() -> None:
    declined = Declined("model", "x is not y")
    assert "step `model`: x is not y" in _failures(_join(HELLO, answer=declined))
    assert "2 of --nnodes 3 machines could take part, rank 2 missing" in _failures(_join(HELLO))
    few = replace(WANTED, num_nodes=None, num_stages=4)
    assert "not yet 4 stages" in _failures(_join(HELLO, wanted=few))
    full = _join(HELLO, _changed(node_id="b"), _changed(node_id="c"))
    assert "all of --nnodes 3 are there" in _failures(full)


# ---- another machine, on the loopback address ----


@pytest.fixture
def listener(model: str) -> Iterator[Listener]:
    asked = Asked(EngineConfig(model=model), ClusterConfig(), ServeConfig(), has_model=True)
    listener = Listener(HERE, asked, LinkSecurity(KEY), CPU)
    yield listener
    listener.close()


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as other:
        return str(other.getsockname()[1])


def test_a_peer_is_asked_for_everything_that_a_start_depends_on(
    model: str, listener: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", KEY.text())
    name = str(listener.address)
    spread = ["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", _free_port(), "--peers", name]
    found = look(capsys, model, *spread, "--port-range", _free_port())
    # Layers this small are quicker than any link, on a busy machine at least.
    bad = {check for check, one in found.items() if one.status != "ok"} - {f"{name}:link"}
    assert bad == {"tokenizer", "head name"}, found
    assert {check.removeprefix(f"{name}:") for check in found if check.startswith(name)} == {
        "link", "environment", "clock", "MTU", "devices", "join", "way back"
    }  # fmt: skip
    assert "the slowest stage about" in found[f"{name}:link"].message
    assert "would be node 1" in found[f"{name}:join"].message
    assert "come back from node 1 to node 0" in found["first request"].message
    assert "s1" in found["memory"].message and "node 1:devices" in found


def test_a_peer_with_another_key_or_none_at_all_is_told_what_to_type(
    model: str, listener: Listener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", ClusterKey(bytes([1]) * 32).text())
    name, nobody = str(listener.address), f"127.0.0.1:{_free_port()}"
    found = look(capsys, "--peers", name, nobody)
    assert "cluster key is not this one's" in found[f"{name}:peer"].message
    assert "stageline doctor --listen 127.0.0.1" in found[f"{nobody}:peer"].message


def test_a_peer_without_the_model_may_have_it_sent_if_its_disk_has_room(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", KEY.text())
    for free_bytes, status in ((10**9, "ok"), (1000, "failed")):
        monkeypatch.setattr("stageline.doctor.peer.free_disk_bytes", lambda _, free=free_bytes: free)
        asked = Asked(EngineConfig(model=""), ClusterConfig(model_source="peer"), ServeConfig(), has_model=False)
        listener = Listener(HERE, asked, LinkSecurity(KEY), CPU)
        try:
            name, port = str(listener.address), _free_port()
            spread = ["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
            found = look(capsys, model, *spread, "--peers", name)
        finally:
            listener.close()
        assert found[f"{name}:join"].status == "ok" and found[f"{name}:disk"].status == status, found
        assert found[f"{name}:weights port"].status == "ok"


def test_a_peer_with_another_model_is_told_with_both_digests(
    listener: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", KEY.text())
    other = str(write_hf_directory(tmp_path / "other", dtype="BF16"))
    name = str(listener.address)
    spread = ["-pp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", _free_port(), "--peers", name]
    found = look(capsys, other, *spread)
    refusal = found[f"{name}:join"].message
    assert model_digest(open_checkpoint(other))[:16] in refusal and "step `model`" in refusal
    assert found["machines"].status == "failed"


@pytest.mark.parametrize("limit_s", ["-1", "0", "nan", "1e9"])
def test_a_first_request_without_an_end_is_refused(capsys: pytest.CaptureFixture[str], limit_s: str) -> None:
    assert main(["doctor", "--first-request", "--first-request-s", limit_s]) == 2
    assert "--first-request-s is " in capsys.readouterr().err
