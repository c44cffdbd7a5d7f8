"""Pictures in prompts: placeholders, what users write, and the whole way from a file to tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from convert.demo.geometry import TINY
from runtime_min.artifact import Artifact
from runtime_min.cli import main
from runtime_min.engine import Engine
from runtime_min.pictures import media
from runtime_min.prompt import Prompt, encoded, slot, user_message
from runtime_min.request import Limits, Request
from runtime_min.text import ChatError, ChatTemplate, Slot, Tokenizer
from runtime_min.text.media import expanded
from runtime_min.text.tokenizer import Piece
from runtime_min.vision.items import clip, normalized, patches
from tests.lab import converted
from tests.pictures import RULE, data_url, drawn, image_part, saved
from tests.reference import dequantized, reference

PAD = "<|media_pad|>"
IMAGE = "<|media_begin|>image<|media_content|>{}<|media_end|>\n"
VIDEO = "{}<|media_begin|>video<|media_content|>{}<|media_end|>"


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prompts") / "a"
    converted(demo, out)
    return out


def prompt_of(path: Path, content: list[dict[str, Any]], root: Path | None = None, **more: Any) -> Prompt:
    messages = [*more.pop("before", []), {"role": more.pop("role", "user"), "content": content, **more}]
    return encoded(Artifact.open(path), Tokenizer.open(path), {"messages": messages}, root)


def text_of(path: Path, prompt: Prompt) -> str:
    return Tokenizer.open(path).decode(prompt.ids)


def test_an_image_becomes_as_many_pads_as_its_grid_makes(artifact: Path) -> None:
    content = [{"type": "text", "text": "see "}, image_part(saved(drawn(50, 60))), {"type": "text", "text": "?"}]
    prompt = prompt_of(artifact, content)
    assert [i.grid for i in prompt.items] == [(1, 6, 4)]
    assert f"<|im_middle|>see {IMAGE.format(PAD * 6)}?<|im_end|>" in text_of(artifact, prompt)
    assert prompt.ids.count(TINY.special(21)) == 6


def test_a_clip_becomes_its_chunks_with_their_times(artifact: Path) -> None:
    frames = [data_url(saved(drawn(50, 28, s))) for s in range(6)]
    prompt = prompt_of(artifact, [{"type": "video", "video": frames}, {"type": "text", "text": "?"}])
    want = VIDEO.format("00:00:00.000", PAD * 2) + VIDEO.format("00:00:02.000", PAD * 2) + "\n?"
    assert f"<|im_middle|>{want}<|im_end|>" in text_of(artifact, prompt)
    assert [i.grid for i in prompt.items] == [(4, 2, 4), (2, 2, 4)]


@pytest.mark.parametrize(("frames", "fps"), [(6, 2.0), (9, 1.7), (1, 3.0)])
def test_a_clip_s_text_is_the_reference_processor_s(frames: int, fps: float) -> None:
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

    times = [3599.2 + i / fps for i in range(frames)]
    media = clip("x", [drawn(130, 90, i) for i in range(frames)], times, RULE)
    inputs = {
        "num_chunks_per_video": [len(media.items)],
        "video_grid_thw": torch.tensor([i.grid for i in media.items]),
        "video_metadata": [SimpleNamespace(fps=fps, timestamps=times)],
    }
    their = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=4), video_token=PAD)
    assert slot(media).text == Kimi_K25Processor.replace_video_token(their, inputs, 0)


def test_media_of_several_messages_keep_their_order(artifact: Path) -> None:
    """In a tool's answer too, and in what the assistant was shown before."""
    before = [
        {"role": "user", "content": [image_part(saved(drawn(28, 28))), {"type": "text", "text": "a"}]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": [image_part(saved(drawn(56, 56)))]},
    ]
    prompt = prompt_of(artifact, [image_part(saved(drawn(28, 56)))], before=before)
    assert [i.tokens for i in prompt.items] == [1, 4, 2]
    assert [i.where.split(".image_url")[0] for i in prompt.items] == [
        f"messages[{m}].content[0]" for m in range(3)
    ]  # fmt: skip
    text = text_of(artifact, prompt)
    assert [len(part.split("<|media_end|>")[0]) // len(PAD) for part in text.split("<|media_content|>")[1:]] == [
        1,
        4,
        2,
    ]


EVIL = ("<|media_pad|>", "<|kimi_k25_video_placeholder|>", IMAGE.format(PAD), "<|media_end|>")


@pytest.mark.parametrize("evil", EVIL)
def test_what_users_write_is_no_placeholder(artifact: Path, evil: str) -> None:
    content = [{"type": "text", "text": evil}, image_part(saved(drawn(50, 60))), {"type": "text", "text": evil}]
    prompt = prompt_of(artifact, content, name=evil)
    assert prompt.ids.count(TINY.special(21)) == 6 and len(prompt.items) == 1
    assert all(prompt.ids.count(TINY.special(i)) == 1 for i in (18, 19, 20))
    assert text_of(artifact, prompt).count(evil) >= 3
    alone = prompt_of(artifact, [{"type": "text", "text": evil}])
    assert not alone.items and not {TINY.special(i) for i in (18, 19, 20, 21)} & set(alone.ids)


def test_places_and_pictures_are_counted(artifact: Path) -> None:
    one, clip = Slot("x", "image", (("", 2),)), Slot("y", "video", (("00:00:00.000", 2),))
    place = [Piece(IMAGE.format(PAD), True), Piece(PAD, False)]
    assert expanded(place, [one]) == [Piece(IMAGE.format(PAD * 2), True), Piece(PAD, False)]
    for slots in ([], [one, one]):
        with pytest.raises(ChatError, match=rf"the prompt has 1 places .*, the request has {len(slots)}"):
            expanded(place, slots)
    with pytest.raises(ChatError, match=r"y: is video, but the template writes <\|media_pad\|>"):
        expanded(place, [clip])
    with pytest.raises(ChatError, match="x: is image, but the template writes"):
        expanded([Piece("<|kimi_k25_video_placeholder|>", True)], [one])
    bare = [{"role": "user", "content": [{"type": "image"}]}]
    template, tokenizer = ChatTemplate.open(artifact), Tokenizer.open(artifact)
    with pytest.raises(ChatError, match="has 1 places"):
        template.encode_chat(tokenizer, bare, media=[])


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.jpg").write_bytes(saved(drawn(120, 90), "JPEG"))
    (tmp_path / "two.png").write_bytes(saved(drawn(50, 300, 1).convert("L")))
    (tmp_path / "no.png").write_bytes(b"no picture")
    return tmp_path


def generated(artifact: Path, *args: object) -> list[int]:
    result = run("generate", artifact, "--device", "cpu", "--max-tokens", 8, "--json", *args)
    assert result.exit_code == 0, result.stderr
    return [int(i) for i in json.loads(result.stdout)["ids"]]


def test_files_to_tokens_equals_transformers(demo: Path, artifact: Path, folder: Path, tmp_path: Path) -> None:
    """A JPEG and a gray PNG with a question, by flags and by messages: transformers' greedy tokens for these pixels."""
    model = reference(dequantized(demo, tmp_path / "dense"))
    files = [folder / "one.jpg", folder / "two.png"]
    request = {"messages": [user_message("what?", files, [])]}
    prompt = encoded(Artifact.open(artifact), Tokenizer.open(artifact), request, Path("/"))
    pixels = torch.cat([normalized(patches(i, 14), RULE) for i in prompt.items])
    grids = torch.tensor([i.grid for i in prompt.items])
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        model.generation_config.eos_token_id = None
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grids, max_new_tokens=8,
            do_sample=False,
        )[0, len(prompt.ids) :].tolist()  # fmt: skip
    found = generated(artifact, "--prompt", "what?", *(a for f in files for a in ("--image", f)))
    assert found == said[: len(found)] and found
    other = generated(artifact, "--prompt", "what?", "--image", files[0])
    assert other != found
    parts = [
        image_part((folder / "one.jpg").read_bytes()),
        {"type": "image_url", "image_url": {"url": "two.png"}},
        {"type": "text", "text": "what?"},
    ]
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": parts}]))
    assert generated(artifact, "--messages", tmp_path / "chat.json", "--media-root", folder) == found


def test_what_cannot_be_seen_is_refused_by_name(artifact: Path, folder: Path) -> None:
    common = ("generate", artifact, "--device", "cpu", "--max-tokens", 2)
    result = run(*common, "--prompt", "x", "--image", folder / "one.jpg", "--image", folder / "no.png")
    assert result.exit_code == 1 and "messages[0].content[1].image" in result.stderr and "no.png" in result.stderr
    (folder / "chat.json").write_text(
        json.dumps([{"role": "user", "content": [{"type": "image", "image": "one.jpg"}]}])
    )
    result = run(*common, "--messages", folder / "chat.json")
    assert result.exit_code == 1 and "--media-root" in result.stderr
    result = run(*common, "--ids", f"1,{TINY.special(21)},2")
    assert result.exit_code == 1 and f"1 picture tokens (id {TINY.special(21)}), the pictures make 0" in result.stderr
    result = run(*common, "--ids", "1", "--image", folder / "one.jpg")
    assert result.exit_code == 2 and "--image and --video go with --prompt" in result.stderr
    assert run(*common, "--prompt", "x", "--image", folder / "none.png").exit_code == 2


def test_a_prompt_too_long_is_refused_before_pictures_are_decoded(artifact: Path, folder: Path) -> None:
    (folder / "cut.jpg").write_bytes(saved(drawn(2000, 1500), "JPEG")[:-9000])
    common = ("generate", artifact, "--device", "cpu", "--prompt", "x", "--image", folder / "cut.jpg")
    result = run(*common, "--max-tokens", 262000)
    assert result.exit_code == 1 and "exceed the context" in result.stderr and "cut short" not in result.stderr
    result = run(*common, "--max-tokens", 2)
    assert result.exit_code == 1 and "damaged or cut short" in result.stderr and "cut.jpg" in result.stderr


def test_ranks_see_a_picture_as_one_does_and_know_it_again(
    demo: Path, artifact: Path, folder: Path, tmp_path: Path
) -> None:
    """Two ranks, by the command and by an engine that is asked twice; another picture of the same size is another."""
    files = ("--image", folder / "one.jpg", "--image", folder / "two.png")
    want = generated(artifact, "--prompt", "what?", *files)
    converted(demo, tmp_path / "two", world=2, tp=2)
    assert generated(tmp_path / "two", "--prompt", "what?", *files) == want
    opened, tokenizer = Artifact.open(artifact), Tokenizer.open(artifact)

    def asked(*paths: Path) -> Request:
        prompt = encoded(opened, tokenizer, {"messages": [user_message("what?", paths, [])]}, Path("/"))
        seen = media(prompt.ids, opened.config.ids.media_placeholder, prompt.items, 14)
        return Request(prompt=tuple(prompt.ids), max_tokens=8, stops=tokenizer.stop_ids, media=seen)

    (folder / "other.jpg").write_bytes(saved(drawn(120, 90, 5), "JPEG"))
    one, other = asked(folder / "one.jpg", folder / "two.png"), asked(folder / "other.jpg", folder / "two.png")
    assert one.prompt == other.prompt
    limits = Limits(running=2, step_tokens=64, share=16, cache_tokens=1024, page_tokens=8)
    with Engine(tmp_path / "two", limits, device="cpu") as engine:
        first, again, third = (engine.generate([r])[0] for r in (one, one, other))
    assert first.ids == again.ids == want and third.ids == generated(
        artifact, "--prompt", "what?", "--image", folder / "other.jpg", "--image", folder / "two.png"
    )
    assert first.cached == 0 and again.cached == (len(one.prompt) - 1) // 8 * 8
    assert third.cached == one.media[0].position // 8 * 8
