"""From files to patches: the released rule, every odd format, clips, and refusals that name the picture."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from convert.demo.geometry import template
from runtime_min.vision import clips
from runtime_min.vision.items import Media, clip, digest, normalized, patches, picture, prepared, stamp
from runtime_min.vision.picture import MAX_PIXELS, rgb
from runtime_min.vision.rule import Fit, MediaError, Rule
from runtime_min.vision.sources import Sources
from tests.pictures import RULE, data_url, drawn, image_part, saved

P = RULE.patch


@pytest.mark.parametrize(
    ("size", "limit", "resized", "padded", "grid", "tokens"),
    [
        ((1, 1), 16384, (1, 1), (28, 28), (2, 2), 1),
        ((29, 28), 16384, (29, 28), (56, 28), (2, 4), 2),
        ((50, 50), 16384, (50, 50), (56, 56), (4, 4), 4),
        ((448, 448), 16384, (448, 448), (448, 448), (32, 32), 256),
        ((600, 400), 16384, (600, 400), (616, 420), (30, 44), 330),
        ((1920, 1080), 16384, (1920, 1080), (1932, 1092), (78, 138), 2691),
        ((1920, 1080), 4096, (1196, 672), (1204, 672), (48, 86), 1032),
        ((4000, 3000), 16384, (2073, 1554), (2100, 1568), (112, 150), 4200),
        ((10000, 100), 16384, (7168, 71), (7168, 84), (6, 512), 768),
        ((10000, 10), 16384, (7168, 7), (7168, 28), (2, 512), 256),
        ((8000, 8000), 16384, (1793, 1793), (1820, 1820), (130, 130), 4225),
    ],
)
def test_sizes_of_the_released_preprocessor(
    size: tuple[int, int], limit: int, resized: Any, padded: Any, grid: tuple[int, int], tokens: int
) -> None:
    fit = RULE.fit(*size, limit)
    assert fit == Fit(*resized, *padded) and RULE.grid(fit) == grid and grid[0] * grid[1] // 4 == tokens


def test_the_rule_is_read_from_the_preprocessor_s_file(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(template("preprocessor_config.json"))
    assert Rule.open(tmp_path) == RULE
    text = template("preprocessor_config.json").replace('"patch_size": 14', '"patch_size": -1')
    text = text.replace('"fixed_output_tokens": null', '"fixed_output_tokens": 64')
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(MediaError) as caught:
        Rule.open(tmp_path)
    assert len(caught.value.problems) == 2 and "patch_size: found -1" in str(caught.value)
    with pytest.raises(MediaError, match="not there"):
        Rule.open(tmp_path / "none")


def seen(media: Media) -> Tensor:
    """The padded picture [H, W, 3] that an image's patches show."""
    (item,) = media.items
    _, h, w = item.grid
    return patches(item, P).view(h, w, 3, P, P).permute(0, 3, 1, 4, 2).reshape(h * P, w * P, 3)


def as_tensor(image: Image.Image) -> Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, -1)


@pytest.mark.parametrize("size", [(1, 1), (29, 28), (50, 61), (448, 448)])
def test_patches_are_the_picture_padded_with_zeros(size: tuple[int, int]) -> None:
    image = drawn(*size)
    found = seen(picture("x", saved(image), RULE))
    assert torch.equal(found[: size[1], : size[0]], as_tensor(image))
    assert found[size[1] :].sum() == found[:, size[0] :].sum() == 0


def test_large_pictures_are_resized_by_pillow_s_bicubic() -> None:
    image = drawn(2600, 1900)
    fit = RULE.fit(2600, 1900, RULE.limit)
    found = seen(picture("x", saved(image), RULE))
    want = as_tensor(image.resize((fit.width, fit.height), Image.Resampling.BICUBIC))
    assert torch.equal(found[: fit.height, : fit.width], want) and fit.width < 2600


def test_pixels_are_normalized_as_the_reference_does() -> None:
    raw = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(256, 3, 1, 1)
    want = (torch.arange(256).float() / 255 - 0.5) / 0.5
    assert (normalized(raw, RULE)[:, 0, 0, 0] - want).abs().max() < 1e-6
    assert normalized(raw[:1], RULE).unique().tolist() == [-1.0]


def test_the_order_of_patches_is_rows_then_columns_and_channels_first() -> None:
    image = Image.new("RGB", (56, 28))
    image.paste((9, 8, 7), (28, 14, 42, 28))
    raw = patches(picture("x", saved(image), RULE).items[0], P)
    assert raw.shape == (8, 3, P, P) and [int(i) for i in raw.flatten(1).sum(1).nonzero()] == [6]
    assert raw[6, :, 3, 5].tolist() == [9, 8, 7]


def palette(image: Image.Image) -> Image.Image:
    return image.quantize(16)


SAME: dict[str, tuple[Callable[[Image.Image], Image.Image], dict[str, Any]]] = {
    "PNG": (lambda i: i, {}),
    "BMP": (lambda i: i, {}),
    "TIFF": (lambda i: i, {}),
    "WEBP": (lambda i: i, {"lossless": True}),
    "PPM": (lambda i: i, {}),
    "RGBA": (lambda i: i.convert("RGBA"), {"form": "PNG"}),
}


@pytest.mark.parametrize("name", SAME)
def test_formats_without_loss_give_the_same_pixels(name: str) -> None:
    image = drawn(40, 30)
    change, options = SAME[name]
    data = saved(change(image), **{"form": name, **options})
    assert torch.equal(seen(picture("x", data, RULE))[:30, :40], as_tensor(image))


def test_odd_modes() -> None:
    image = drawn(40, 30)
    gray = image.convert("L")
    for data, want in (
        (saved(gray), gray.convert("RGB")),
        (saved(image.convert("LA")), gray.convert("RGB")),
        (saved(image.convert("1")), image.convert("1").convert("RGB")),
        (saved(palette(image)), palette(image).convert("RGB")),
        (saved(palette(image), "GIF"), palette(image).convert("RGB")),
        (saved(image.convert("CMYK"), "TIFF"), image.convert("CMYK").convert("RGB")),
    ):
        assert torch.equal(seen(picture("x", data, RULE))[:30, :40], as_tensor(want))


def test_alpha_is_dropped_not_blended() -> None:
    image = Image.new("RGBA", (28, 28), (200, 100, 50, 0))
    assert (seen(picture("x", saved(image), RULE)) == torch.tensor([200, 100, 50])).all()


def test_sixteen_bits_keep_their_upper_eight() -> None:
    image = Image.new("I;16", (28, 28))
    for x, value in enumerate((0, 255, 256, 32768, 65535)):
        image.putpixel((x, 0), value)
    for form in ("PNG", "TIFF"):
        assert seen(picture("x", saved(image, form), RULE))[0, :5, 1].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture(form: str, orientation: int) -> None:
    """Corner colours after the turn, and a grid that fits the turned size."""
    image = Image.new("RGB", (64, 32), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    media = picture("x", saved(image, form, exif=exif), RULE)
    width, height = (32, 64) if orientation > 4 else (64, 32)
    assert media.items[0].fit == RULE.fit(width, height, RULE.limit)
    found = seen(media)[:height, :width].float()
    corners = {(0, 0): (1, 5), (0, -1): (2, 6), (-1, -1): (3, 7), (-1, 0): (4, 8)}
    for (y, x), there in corners.items():
        red, _, blue = found[y * 3 if y else 3, x * 3 if x else 3].tolist()
        assert (red > blue) == (orientation in there), (y, x)


def test_the_first_frame_of_an_animation() -> None:
    frames = [drawn(30, 30, seed) for seed in (1, 2, 3)]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert torch.equal(seen(picture("x", data, RULE))[:30, :30], as_tensor(frames[0]))


def test_equal_digests_mean_equal_pictures() -> None:
    one, same, other = (picture("x", d, RULE).items[0] for d in (
        saved(drawn(40, 30)), saved(drawn(40, 30), "BMP"), saved(drawn(40, 30, 1))
    ))  # fmt: skip
    names = [digest(made) for made in prepared((one, same, other), P)]
    assert names[0] == names[1] != names[2]


def png_of_size(width: int, height: int) -> bytes:
    """A PNG header that claims these sizes over next to no data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


REFUSED = {
    "empty": (b"", "is no picture"),
    "text": (b"<html>no picture</html>", "is no picture"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture"),
    "bomb": (png_of_size(60_000, 60_000), "too many pixels"),
    "just over": (png_of_size(MAX_PIXELS // 100 + 1, 100), "too many pixels"),
    "short of data": (png_of_size(600, 400), "damaged or cut short"),
    "truncated png": (saved(drawn(300, 300))[:-400], "damaged or cut short"),
    "truncated jpeg": (saved(drawn(300, 300), "JPEG")[:-900], "damaged or cut short"),
    "truncated webp": (saved(drawn(300, 300), "WEBP")[:-90], "cut short|cannot be read|is no picture"),
    "header only": (saved(drawn(300, 300))[:20], "is no picture|cannot be read"),
    "floats": (saved(Image.new("F", (4, 4)), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_by_name(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(MediaError, match=rf"^messages\[0\]: .*({said})"):
        patches(picture("messages[0]", data, RULE).items[0], P)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_damage_anywhere_is_an_error_or_a_picture_never_a_crash(form: str) -> None:
    data = saved(drawn(60, 50), form)
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        broken = bytearray(data)
        for at in torch.randint(0, len(data), (4,), generator=generator).tolist():
            broken[at] ^= 1 << at % 8
        try:
            item = picture("x", bytes(broken), RULE).items[0]
            if item.grid[1] * item.grid[2] < 4000:
                assert len(patches(item, P)) == item.grid[1] * item.grid[2]
        except MediaError as e:
            assert str(e).startswith("x: ")


def test_times_are_written_as_the_reference_does() -> None:
    import time

    for s in (0.0, 0.5, 59.9994, 61.25, 3599.999, 3723.0417, 86399.5, 90000.0):
        assert stamp("x", s) == time.strftime("%H:%M:%S", time.gmtime(s)) + f".{int(s % 1 * 1000):03d}"
    for bad in (-0.1, float("inf"), float("nan")):
        with pytest.raises(MediaError, match="expected one from 0 up"):
            stamp("x", bad)


def test_a_clip_is_chunks_of_four_frames_with_the_time_of_the_first() -> None:
    frames = [drawn(1920, 1080, seed) for seed in range(6)]
    media = clip("x", frames, [i / 2 for i in range(6)], RULE)
    assert [i.grid for i in media.items] == [(4, 48, 86), (2, 48, 86)] and media.stamps == (
        "00:00:00.000",
        "00:00:02.000",
    )
    assert [i.tokens for i in media.items] == [1032, 1032]
    whole = patches(media.items[1], P).view(2, 48 * 86, 3, P, P)
    fit = RULE.fit(1920, 1080, RULE.frame_limit)
    small = as_tensor(frames[5].resize((fit.width, fit.height), Image.Resampling.BICUBIC))
    assert torch.equal(whole[1, 87, :, 2, 3], small[P + 2, P + 3])


def test_frames_of_a_clip_have_one_size_and_one_time_each() -> None:
    with pytest.raises(MediaError, match=r"x frame 1: is 20 x 30, the first is 30 x 30"):
        clip("x", [drawn(30, 30), drawn(20, 30)], [0, 1], RULE)
    with pytest.raises(MediaError, match="2 frames with 1 times"):
        clip("x", [drawn(30, 30)] * 2, [0], RULE)
    with pytest.raises(MediaError, match="0 frames"):
        clip("x", [], [], RULE)


@pytest.mark.parametrize("size", [(374, 2309), (374, 2473), (300, 2760), (1920, 1080)])
def test_frames_that_were_resized_already_keep_the_fit_of_their_first_size(size: tuple[int, int]) -> None:
    """Fitting once more what was fitted gives a smaller frame for some sizes."""
    fit = RULE.fit(*size, RULE.frame_limit)
    media = clip("x", [drawn(fit.width, fit.height, i) for i in range(5)], [0.0, 0.5, 1.0, 1.5, 2.0], RULE, size)
    assert [i.fit for i in media.items] == [fit, fit]
    assert [i.grid[1:] for i in media.items] == [RULE.grid(fit)] * 2


def test_which_frames_of_a_file_are_taken() -> None:
    """As the reference samples: evenly, two a second, at least one; and never more than there are, where it refuses."""
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    for total, rate in ((48, 24.0), (5, 24.0), (100, 29.97), (721, 23.976), (1000, 60.0)):
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        assert clips.chosen(total, rate, 2.0) == default_sample_indices_fn(metadata, fps=2.0).tolist()
    assert clips.chosen(48, 24.0, 2.0) == [0, 12, 24, 36]
    assert clips.chosen(5, 24.0, 2.0) == [0] and clips.chosen(3, 1.0, 2.0) == [0, 1, 2]
    assert clips.chosen(100, 29.97, 2.0) == [i * 100 // 6 for i in range(6)]


def video(frames: int, rate: int, size: tuple[int, int] = (64, 48)) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(frames):
            for packet in stream.encode(av.VideoFrame.from_image(Image.new("RGB", size, (i * 8, 128, 255 - i * 8)))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def test_a_video_file_becomes_frames_at_two_a_second() -> None:
    data = video(30, 10)
    media = clips.from_file("x", data, RULE)
    assert [i.grid for i in media.items] == [(4, 4, 6), (2, 4, 6)] and media.stamps == ("00:00:00.000", "00:00:02.000")
    reds = patches(media.items[0], P).view(4, 24, 3, P, P)[:, 0, 0, 3, 3].tolist()
    assert all(abs(r - 8 * i) < 12 for r, i in zip(reds, (0, 5, 10, 15), strict=True))
    for broken, said in (
        (b"no video at all", "cannot be read as a video"),
        (data[: len(data) // 2], "video|cut short"),
    ):
        with pytest.raises(MediaError, match=f"^x: .*({said})"):
            clips.from_file("x", broken, RULE)


def test_without_pyav_a_video_file_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"^x: .*kiln\[video\]"):
        clips.from_file("x", b"", RULE)


def message(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "t"}, *content]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a picture.png").write_bytes(saved(drawn(30, 30)))
    (tmp_path / "secret.png").write_bytes(saved(drawn(30, 30)))
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    return inside


def test_data_urls_and_files_under_the_allowed_folder(folder: Path) -> None:
    sources, data = Sources(rule=RULE, root=folder), saved(drawn(50, 50))
    frames = [data_url(saved(drawn(30, 30, s))) for s in range(5)]
    media = sources.media(message(
        image_part(data),
        {"type": "image_url", "image_url": "a picture.png"},
        {"type": "image", "image": f"file://{folder}/a%20picture.png"},
        {"type": "image", "image": str(folder / "a picture.png")},
        {"type": "video", "video": frames, "fps": 4},
        {"type": "video", "video": frames[:1], "timestamps": [61.5]},
    ))  # fmt: skip
    assert [m.kind for m in media] == ["image"] * 4 + ["video"] * 2
    assert [len(m.items) for m in media] == [1, 1, 1, 1, 2, 1] and media[0].items[0].tokens == 4
    assert media[4].stamps == ("00:00:00.000", "00:00:01.000") and media[5].stamps == ("00:01:01.500",)
    assert torch.equal(seen(media[1]), seen(media[2]))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "image": "https://x.example/a.png"}, "https addresses are not fetched"),
    ({"type": "image", "image": "ftp://x.example/a.png"}, "ftp addresses are not fetched"),
    ({"type": "image", "image": "../secret.png"}, "outside the allowed folder"),
    ({"type": "image", "image": "/etc/passwd"}, "outside the allowed folder"),
    ({"type": "image", "image": "link.png"}, "outside the allowed folder"),
    ({"type": "image", "image": "none.png"}, "No such file"),
    ({"type": "image", "image": "."}, "cannot be read"),
    ({"type": "image", "image": "a\0b"}, "cannot be read"),
    ({"type": "image"}, "found None, expected a data URL or the path"),
    ({"type": "image_url", "image_url": {"url": 5}}, "found 5, expected"),
    ({"type": "image", "image": "data:image/png;base64,@@@@"}, "base64 is wrong"),
    ({"type": "image", "image": "data:image/png,abc"}, "expected data:image/TYPE;base64"),
    ({"type": "image", "image": data_url(b"no picture")}, "is no picture"),
    ({"type": "video", "video": [data_url(b"no picture")]}, "frame 0: is no picture"),
    ({"type": "video", "video": [7]}, "frame 0: found 7"),
    ({"type": "video", "video": [], "fps": 2}, "0 frames"),
    ({"type": "video", "video": [data_url(saved(drawn(9, 9)))], "fps": 0}, "fps: found 0"),
    ({"type": "video", "video": [data_url(saved(drawn(9, 9)))], "timestamps": ["a"]}, "timestamps: found"),
]


@pytest.mark.parametrize(("part", "said"), WRONG, ids=[said for _, said in WRONG])
def test_parts_that_cannot_be_taken_are_named(folder: Path, part: dict[str, Any], said: str) -> None:
    good = image_part(saved(drawn(30, 30)))
    with pytest.raises(MediaError, match=rf"^messages\[1\]\.content\[2\].*{said}"):
        Sources(rule=RULE, root=folder).media(message(good, part))


def test_without_an_allowed_folder_no_file_is_read(folder: Path) -> None:
    for name in (str(folder / "a picture.png"), f"file://{folder}/a%20picture.png"):
        with pytest.raises(MediaError, match=r"--media-root"):
            Sources(rule=RULE).media(message({"type": "image", "image": name}))


@pytest.mark.gpu
def test_pixels_equal_transformers_image_processor() -> None:
    """Within one 8-bit step, on the pictures that come with scikit-image and scikit-learn."""
    pytest.importorskip("torchvision")
    data = pytest.importorskip("skimage").data
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    names = (
        "astronaut",
        "camera",
        "chelsea",
        "coffee",
        "coins",
        "immunohistochemistry",
        "logo",
        "moon",
        "page",
        "rocket",
    )
    images = [Image.fromarray(getattr(data, name)()).convert("RGB") for name in names]
    load = pytest.importorskip("sklearn.datasets").load_sample_image
    images += [Image.fromarray(load(name)) for name in ("china.jpg", "flower.jpg")]
    large = [images[0].resize((4000, 3000)), images[2].resize((3000, 500))]
    reference = Kimi_K25ImageProcessor()
    for image in [*images, *large]:
        want = reference(images=[image], return_tensors="pt")
        item = picture("x", saved(image), RULE).items[0]
        assert want["image_grid_thw"].tolist() == [list(item.grid)]
        steps = (normalized(patches(item, P), RULE) - want["pixel_values"]).abs() * 255 / 2
        # Pillow, as in the original, and torchvision, as here, round differently between the two passes of a resize.
        assert steps.max() <= (2.01 if image in large else 1.01) and (steps > 1.01).float().mean() < 1e-4
    assert rgb("x", images[0]).mode == "RGB"
