"""
Tests of plumbing/data.py: python -m pytest tests/test_data.py -q

Subtitles in prompts: test_eval.py. --check: test_check.py.
"""
import json
import subprocess

import pytest
from fixtures import write_rows

import launch
from plumbing import data

# ------------------------------------------------------------------------------------------------
# Labels


def labelled(kind, answer, options=None):
    return {"id": "t", "video": "v.mp4", "question": "Which?", "type": kind, "answer": answer,
            "options": options}


FOUR = ["Apple", "Pear", "A. Milne", "Egg"]


@pytest.mark.parametrize("task, wanted", [
    (labelled("open", "x") | {"evidence": [5, 10]}, "list of windows"),
    (labelled("mcq", "Apple", FOUR), "letter"), (labelled("mcq", "b", FOUR), "capital letter"),
    (labelled("mcq", "E", FOUR), "letter"), (labelled("mcq", 1, FOUR), "the capital letter of"),
    (labelled("grounding", ["0", "5"]), "in seconds"), (labelled("grounding", [-1, 5]), "<= start"),
    (labelled("grounding", [25, 25]), "<= start"), (labelled("grounding", [1, 2, 3]), "in sec"),
    (labelled("open", "a </answer> b"), "no tags"), (labelled("list", ", ,"), "letter or a digit"),
    (labelled("open", 4), "a text"), (labelled("mcq", "A", ["yes", 1]), "list of strings"),
    (labelled("open", "x") | {"question": 4}, "must be texts")])
def test_a_label_that_can_never_be_paid_is_refused_by_its_line(tmp_path, task, wanted):
    path = write_rows(tmp_path / "tasks.jsonl", [labelled("open", "fine"), {**task, "id": "u"}])
    with pytest.raises(launch.UserError) as e:
        data.read_tasks(str(path))
    assert str(e.value).startswith(f"{path}:2: ") and wanted in str(e.value)


@pytest.mark.parametrize("task", [
    labelled("open", "She says: \"no, thanks\".\nThen she leaves."), labelled("mcq", "D", FOUR),
    labelled("grounding", [24.296875, 30.40000057220459]), labelled("open", "一只红色的狗"),
    labelled("mcq", "Z", [str(n) for n in range(26)]), labelled("list", "16 red, 40 blue"),
    labelled("open", "-0.5"), labelled("list", "红, 蓝"), labelled("open", "the")])
def test_labels_of_every_kind_are_read(tmp_path, task):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task), encoding="utf-8-sig")
    assert data.read_tasks(str(path)) == [task]


@pytest.mark.parametrize("read, row, hint", [
    (data.read_chats, labelled("open", "red"), "missing 'messages'"),
    (data.read_chats, {"id": "c", "messages": [], "videos": ["v.mp4"]}, "column 'videos', which"),
    (data.read_tasks, {"id": "t", "messages": []}, "missing 'video'")])
def test_a_file_of_the_other_kind_is_named(tmp_path, read, row, hint):
    pytest.raises(launch.UserError, read, str(write_rows(tmp_path / "r.jsonl", [row]))).match(hint)


def test_ids_are_counted_as_strings(tmp_path):
    tasks = [{**labelled("open", "red"), "id": name} for name in (7, "a", "7")]
    path = write_rows(tmp_path / "t.jsonl", tasks)
    with pytest.raises(launch.UserError, match="t.jsonl:3: .* not unique: 7 is there twice"):
        data.read_tasks(str(path))


# ------------------------------------------------------------------------------------------------
# Subtitles


SRT = ("\ufeff1\r\n00:00:05,000 --> 00:00:07,500\r\n<font color=\"white\">Two\r\n lines</font>\r\n"
       "\r\n2\r\n00:00:01,000 --> 00:00:02,000\r\nFirst <i>one</i>\r\n\r\n"
       "3\r\n00:00:07,500 --> 01:00:00,250\r\nLast\r\n")


def test_srt_is_read_in_time_order_without_formatting(tmp_path):
    (tmp_path / "a.srt").write_bytes(SRT.encode())
    lines = [(1.0, 2.0, "First one"), (5.0, 7.5, "Two lines"), (7.5, 3600.25, "Last")]
    assert data.read_subtitles(str(tmp_path / "a.srt")) == lines


@pytest.mark.parametrize("text, wanted", [
    ("if a < b and c > d then stop", "if a < b and c > d then stop"), ("I <3 you", "I <3 you"),
    ("so a <b and c> d", "so a <b and c> d"), ("<me@x.org> wrote", "<me@x.org> wrote"),
    ("<i>one</i> <font color=\"#fff\" size='2'>two</font><br/>", "one two"),
    ("<c.yellow.bg_blue>one</c> <v Roger Bingham>two</v> <lang en>x</lang>", "one two x"),
    ("<00:00:01.500><c>one</c>", "one"), ("{\\an8}One\\NTwo", "One Two"),
    ("{\\pos(1,2)\\i1}One{\\i0}", "One"), ("{sic} C:\\new", "{sic} C:\\new")])
def test_markup_goes_and_text_stays(tmp_path, text, wanted):
    (tmp_path / "a.srt").write_text(f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n")
    assert [row for *_, row in data.read_subtitles(str(tmp_path / "a.srt"))] == [wanted]


@pytest.mark.parametrize("name, text", [("a.json", "{broken"), ("a.json", '[{"x": 1}]'),
                                        ("a.json", '{"a": 1}'), ("none.srt", None)])
def test_unreadable_subtitles_are_named(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(launch.UserError, match=f"{name}: unreadable subtitles"):
        data.read_subtitles(str(tmp_path / name))


def test_aligned_lines_are_those_spoken_at_a_frame(tmp_path):
    rows = [(0, 1, "a"), (2, 3, "b"), (3.5, 4, "b"), (5, 6, "c"), (7, 7.5, ""), (8, 9, "b")]
    cues = [{"start": start, "end": end, "line": text} for start, end, text in rows]
    (tmp_path / "a.json").write_text(json.dumps(cues))

    def text(seconds, **more):
        return data.task_subtitles({"subtitles": "a.json", **more}, seconds, str(tmp_path))

    assert text([1.0, 2.5, 3.5, 5.5, 8.1]) == "a\nb\nc\nb"  # ends count; a repeat is shown once
    assert text([2.0, 3.6]) == "b" and text([1.5, 4.5]) == ""
    assert text([1.0, 1.5], subtitle_start=4.0) == "c"  # the video begins at the file's second 4
    assert data.task_subtitles({"subtitles": None}, [1.0], str(tmp_path)) == ""


@pytest.mark.process
def test_webvtt_says_what_ffmpeg_reads(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    (tmp_path / "a.vtt").write_text(
        "WEBVTT - a title\n\nNOTE a note\nof two lines\n\nSTYLE\n::cue { color: red }\n\n"
        "intro\n00:01.500 --> 00:03.250 align:start position:0%\nTom &amp; <b>Jerry</b>\n\n"
        "01:00:02.000 --> 01:00:04.125\n<v Ann>two\nlines &lt;here&gt;\n")
    subprocess.run([ffmpeg, "-v", "16", "-i", tmp_path / "a.vtt", tmp_path / "a.srt"], check=True)
    mine, theirs = (data.read_subtitles(str(tmp_path / name)) for name in ("a.vtt", "a.srt"))
    assert [x[:2] for x in mine] == [x[:2] for x in theirs] == [(1.5, 3.25), (3602.0, 3604.125)]
    assert [line[2] for line in mine] == ["Tom & Jerry", "two lines <here>"]
    assert theirs[0][2] == mine[0][2]


def test_longvideobench_subtitles_come_in_two_forms(tmp_path):
    # In a cache of the Hub a file is a blob without an ending.
    (tmp_path / "5f2c").write_text(json.dumps([{"timestamp": [12.5, 14.0], "text": "Hello"},
                                               {"timestamp": [15.0, None], "text": "open"},
                                               {"timestamp": [16.0, 17.0], "text": "end"}]))
    (tmp_path / "b.json").write_text(json.dumps([
        {"start": "00:00:12.500", "end": "00:00:14.000", "line": "Hello"}]))
    assert data.read_subtitles(str(tmp_path / "5f2c")) == [
        (12.5, 14.0, "Hello"), (15.0, 1e8, "open"), (16.0, 17.0, "end")]
    assert data.read_subtitles(str(tmp_path / "b.json")) == [(12.5, 14.0, "Hello")]


def test_rolling_captions_show_each_line_as_long_as_it_stands(tmp_path):
    """A line moves up while the next one is spoken, and is written again for that."""
    cues = ("00:00.000 --> 00:02.400", " \na<00:01.000><c> car</c>"), (
        "00:02.400 --> 00:04.800", "a car\nit stops"), ("00:06.000 --> 00:09.000", "it stops")
    text = "WEBVTT\n\n" + "".join(f"{times}\n{said}\n\n" for times, said in cues)
    (tmp_path / "a.vtt").write_text(text)
    lines = data.read_subtitles(str(tmp_path / "a.vtt"))
    assert lines == [(0.0, 2.4, "a car"), (2.4, 4.8, "it stops"), (6.0, 9.0, "it stops")]
