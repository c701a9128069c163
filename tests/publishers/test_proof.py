"""
Whether our protocols send what their publishers' own code sends:
python -m pytest tests/publishers --checkouts DIR -q

DIR holds clones, named as in KNOWN of proof.py. Their code runs in a child process without a
network and keys; whoever runs it trusts it as far as that. A protocol without a clone is skipped.
rewatch-r1 and reasoning (Video-Thinker) have no code to prove against.
"""
import difflib
import os
import shutil

import proof
import pytest

import eval as evaluation
from evaluation import systems


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    return proof.Films(tmp_path_factory.mktemp("films"))


@pytest.fixture
def clone(request):
    """clone(protocol) -> folder of its publisher's code, or the test is skipped."""
    def clone(protocol, would):
        name, snapshot = proof.KNOWN[protocol]
        path = os.path.join(request.config.getoption("--checkouts") or "", name)
        if not os.path.isdir(path):
            pytest.skip(f"--checkouts names no folder with a clone of {name} ({snapshot}); with "
                        f"one this test {would}")
        return os.path.abspath(path)

    return clone


@pytest.fixture
def flags(monkeypatch):
    """flags(protocol) -> the flags of eval.py, behind an endpoint."""
    def flags(protocol):
        words = "eval.py --engine openai --base-url http://none --model m --data d --protocol"
        monkeypatch.setattr("sys.argv", [*words.split(), protocol])
        return evaluation.parse_args()

    return flags


def differences(args, checkout, some, films, root, ours=None):
    """-> ({case: what differs and is not declared}, declared differences that were met).
    ours: {case: (bodies, episode)} of an earlier call, or empty, to be filled."""
    protocol, ours = proof.made_protocol(args, checkout, films), {} if ours is None else ours
    found, met, tasks = {}, set(), []
    for number, one in enumerate(some):
        place = root / f"{number}"
        place.mkdir(exist_ok=True)
        tasks.append(proof.task_of(one, films, str(place)))
        if one.name not in ours:
            ours[one.name] = proof.ours(args, protocol, one, tasks[-1], str(place))
    sent = proof.theirs(args.protocol, checkout, some, tasks, films)
    for one, told in zip(some, sent):
        both = proof.compared(args, some, told, *ours[one.name])
        used, (a, b) = proof.covered(*both, proof.DECLARED.get(args.protocol, ()))
        if used is None:
            found[one.name] = "\n".join([*difflib.unified_diff(a, b, "theirs", "ours", n=1,
                                                               lineterm="")][:20])
        met |= {*(used or ())}
    return found, met


@pytest.mark.parametrize("protocol", proof.KNOWN)
def test_our_requests_are_those_of_the_publishers_code(protocol, clone, flags, films, tmp_path):
    checkout = clone(protocol, f"compares all requests of --protocol {protocol}")
    some = proof.cases(protocol)
    found, met = differences(flags(protocol), checkout, some, films, tmp_path)
    assert not found, "\n".join(f"{name}\n{diff}" for name, diff in found.items())
    declared = systems.all_systems()[protocol].departures
    assert all(any(text.startswith(one) for text in declared) for one in met)


DRIVER, UTILS = "paravt/eval/driver.py", "paravt/eval/utils.py"
# file, a piece of it, what stands there instead
EDITS = [
    (UTILS, "quality=85", "quality=80"), (UTILS, "max_frames: int = 16", "max_frames: int = 12"),
    (UTILS, '"fps": 1,', '"fps": 2,'), (UTILS, '"max_pixels": 50176,', '"max_pixels": 6272,'),
    (UTILS, "client, model_name, s, nframes, max_turns)", "client, model_name, s, nframes, 1)"),
    (UTILS, "client, model_name, s, nframes, max_turns)", "client, model_name, s, 32, max_turns)"),
    (UTILS, "args.main_nframes,\n                args.max_", "32,\n                args.max_"),
    (UTILS, "f\"{k}. {v}\" for k, v", "f\"{k}. {v.strip()}\" for k, v"),
    (UTILS, '"65536"', '"32768"'), (UTILS, '"nframes": nframes}', '"nframes": min(nframes, 48)}'),
    (DRIVER, "max_parallel=args.max_parallel", "max_parallel=1"),
    (DRIVER, "max_tokens=args.max_tokens", "max_tokens=512"),
    (DRIVER, "video_channel=args.video_channel", "video_channel='image_url'"),
    (DRIVER, "temperature=0,", "temperature=0.1,"), (DRIVER, "force_max = 64", "force_max = 65"),
    (DRIVER, "st + 10", "st + 5"), (DRIVER, "ONLY the letter.", "ONLY a letter."),
    (DRIVER, 'args.get("start", 0)', '0'), (DRIVER, "utils.crop_frames(vpath, st, et)",
                                            "utils.crop_frames(vpath, st, min(et, st + 120))"),
    (DRIVER, 'args.get("start_time", ', 'args.get("begin", '),
    (DRIVER, "turn == max_turns - 1", "turn == max_turns"),
    (DRIVER, "messages.append({\"role\": \"assistant\", \"content\": response})", "pass")]


@pytest.fixture(scope="module")
def kept():
    """Our side of the cases below, which no edit changes."""
    return {}


@pytest.mark.parametrize("file, old, new", EDITS, ids=[f"{f[12:-3]} {o[:20]}" for f, o, _ in EDITS])
def test_one_edit_of_the_authors_driver_is_found(file, old, new, clone, flags, films, tmp_path,
                                                 kept, monkeypatch):
    checkout = clone("paper", "edits the authors' driver and asserts that the proof sees it")
    root = tmp_path / "edited"
    shutil.copytree(os.path.join(checkout, "paravt", "eval"), root / "paravt" / "eval",
                    ignore=shutil.ignore_patterns("lmms-eval"))
    shutil.copy(os.path.join(checkout, "paravt", "__init__.py"), root / "paravt")
    text = (root / file).read_text()
    assert old in text, "the edit has no place"
    (root / file).write_text(text.replace(old, new))
    named = '<tool_call>{"arguments": {"start": 2, "end": 8.4}}</tool_call>'
    calls = proof.crop(10, 30) + proof.crop(40) + named
    some = [proof.case("videomme", [calls, calls, calls, "B"]), proof.case("charades", ["B"]),
            proof.case("mmvu", ["B"], name="white space", question="Which? ",
                       choices=dict(zip("ABCDE", ["a kite ", "two", "", "", ""]))),
            proof.case("videomme", [proof.crop(100, 400), "B"], "700 s", "a long window", frames=4)]
    args = flags("paper")
    if "made" not in kept:
        kept["made"], kept["ours"] = proof.made_protocol(args, checkout, films), {}
    monkeypatch.setattr(proof, "made_protocol", lambda *_: kept["made"])  # unedited texts
    (tmp_path / "roots").mkdir()
    found, _ = differences(args, str(root), some, films, tmp_path / "roots", kept["ours"])
    assert found


def test_a_checkout_of_other_code_is_one_line(flags, films, tmp_path):
    from launch import UserError

    with pytest.raises(UserError, match="no paravt/eval/driver.py"):
        proof.theirs("paper", str(tmp_path), [], [], films)
