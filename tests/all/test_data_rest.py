"""
More of plumbing/data.py, forms of subtitles:
python -m pytest tests/all/test_data_rest.py -q
"""
import json

from plumbing import subtitles


def test_longvideobench_subtitles_come_in_two_forms_and_count_from_elsewhere(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"timestamp": [12.5, 14.0], "text": "Hello"},
                             {"timestamp": [15.0, None], "text": "open"},
                             {"timestamp": [16.0, 17.0], "text": "end"}]))
    (tmp_path / "b.json").write_text(json.dumps([
        {"start": "00:00:12.500", "end": "00:00:14.000", "line": "Hello"}]))
    assert subtitles.read_subtitles(str(tmp_path / "a.json"), 12.5) == [
        (0.0, 1.5, "Hello"), (2.5, 3.5, "open"), (3.5, 4.5, "end")]
    assert subtitles.read_subtitles(str(tmp_path / "b.json"), 12.5) == [(0.0, 1.5, "Hello")]


def test_a_cue_without_text_takes_no_text_of_the_next(tmp_path):
    """And WebVTT lets a cue begin without an empty line before it."""
    path = tmp_path / "c.vtt"
    path.write_text("WEBVTT\n\n00:01.000 --> 00:02.000\na -> b\n\n00:03.000 --> 00:04.000\n\n"
                    "00:05.000 --> 00:06.000\nc\n00:06.000 --> 00:07.000\nd\n")
    assert subtitles.read_subtitles(str(path)) == [(1.0, 2.0, "a -> b"), (5.0, 6.0, "c"),
                                               (6.0, 7.0, "d")]
    path = tmp_path / "c.srt"
    path.write_text("1\n00:00:01,000 --> 00:00:02,000\nin 1999\n2\n00:00:03,000 --> 00:00:04,000\n"
                    "7\nb\n")
    assert subtitles.read_subtitles(str(path)) == [(1.0, 2.0, "in 1999"), (3.0, 4.0, "7 b")]


def test_a_file_of_digits_is_read_as_fast_as_any(tmp_path):
    """Without a bound on the digits of a time these take hours."""
    path = tmp_path / "digits.srt"
    path.write_text("1" * 2_000_000)
    assert subtitles.read_subtitles(str(path)) == []
