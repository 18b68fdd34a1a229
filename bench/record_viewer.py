"""Records docs/img/viewer.gif: the trace viewer while SmolLM2's answer quotes a hidden number.

    python bench/record_viewer.py [--page PAGE.html --number 45257] [--out docs/img/viewer.gif]

Without a page, SmolLM2 reads a text and answers, and that is recorded. Chromium shows the page in
the light theme and Playwright moves the mouse: to the number, to the digits of the answer that look
at it, to the heads that do. All shares are read off the page. `--stills FOLDER` also writes every
frame as PNG, to look at."""

import argparse
import tempfile
from pathlib import Path

import torch
from _reel import HEIGHT, WIDTH, Reel, joined, write_gif
from trace_view import chromium

import attnplug
from attnplug.eval.needle import needle_prompt
from attnplug.models.pretrained import load
from attnplug.trace.view import write_page

OUT = Path(__file__).parent.parent / "docs" / "img" / "viewer.gif"
MODEL = "smollm2-135m"
POLICY = "dense+stream(block=16, query_block=16)"
# The sentence with the number fills a block of this prompt, so that the panel shows all of it.
PROMPT = dict(target_tokens=480, depth=0.35, seed=12, haystack="prose")
# The key block with the number, and the query blocks that are its digits in the answer.
READS = """(number) => {
  const [hidden, answer] = text.find(number, 2);
  const rows = [];
  for (let token = answer.token; token <= answer.last; token++) rows.push(blocks.queryAt(token));
  return [blocks.keyAt(hidden.token), [...new Set(rows)]];
}"""
# The places of the layer and the head that give the key block most, in the row; of several rows,
# in the one where they give least.
BEST = """async ([rows, key]) => {
  let best = [0, 0, -1];
  for (const [layer, part] of (await trace.select(null, null)).entries())
    for (const head of part.heads) {
      const shares = rows.map((row) => {
        let share = 0;
        trace.eachOut([{ ...part, heads: [head] }], row, null, (other, weight) => {
          if (other === key) share += measure.mean(weight, row, row + 1, 1);
        });
        return share;
      });
      if (Math.min(...shares) > best[2]) best = [layer, head, Math.min(...shares)];
    }
  return best.slice(0, 2);
}"""


def record_page(folder: Path) -> tuple[Path, str]:
    """The viewer's page of SmolLM2 that reads and answers, and the number that the text hides."""
    model, tokenizer = load(MODEL, device="cpu")
    needle = needle_prompt(tokenizer, **PROMPT)
    inputs = tokenizer(asked(needle.text), return_tensors="pt")
    attnplug.apply(model, POLICY)
    trace, page = folder / "needle.parquet", folder / "needle.html"
    with (
        torch.inference_mode(),
        attnplug.trace.record(model, trace, tokenizer=tokenizer, name="SmolLM2-135M"),
    ):
        model.generate(**inputs, max_new_tokens=24, do_sample=False)
    write_page(trace, page)
    return page, needle.answer


def asked(prompt: str) -> str:
    """The prompt without the answer's beginning: the model writes all of it, so that each of its
    words is a row of the map."""
    return prompt[: prompt.rindex("The special magic number")].rstrip() + "\n"


def play(reel: Reel, number: str) -> None:
    """The story: a hidden number, the digits that look at it, the heads that do, one word more."""
    page = reel.page
    key, digits = page.evaluate(READS, number)
    before = digits[0] - 2  # the word before the number; a space is between
    copies, finds = page.evaluate(BEST, [digits, key]), page.evaluate(BEST, [[before], key])
    show_head(reel, copies)
    page.evaluate("app.selectBlocks(0, 0)")
    reel.tell("A text hides a number. Where does the model look while it writes the answer?")
    reel.hold(1.4)
    reel.go(reel.middle("#search"))
    reel.click()
    reel.type(number)
    reel.tell(f"Search marks {number} along the map: in the text and in the answer")
    reel.hold(1.3)
    for row, digit in zip(digits, number, strict=True):
        first = row == digits[0]
        reel.go(reel.cell("map", key + 0.5, row + 0.5), 0.8 if first else 0.2)
        reel.click()
        reel.tell(
            f"In this head “{digit}” gives {share(reel)} of its attention to the number's sentence"
        )
        reel.hold(1.4 if first else 0.2)
    reel.go(reel.middle("#measure"), 0.5)
    page.select_option("#measure", "edge")
    heads = page.evaluate("meta.layers.length * meta.heads")
    reel.tell(f"Which of the {heads} heads look there? Each cell is a head, dark ones do")
    reel.hold(1.4)
    reel.go(reel.cell("heads", finds[1], finds[0]), 0.4)
    reel.click()
    reel.go(reel.cell("map", key + 0.5, before + 0.5), 0.5)
    reel.click()
    reel.tell(
        f"{page.inner_text('#shown').partition(' ·')[0]}: the word “is” already looks at "
        f"the number ({share(reel)})"
    )
    reel.hold(2.4)


def show_head(reel: Reel, places: tuple[int, int]) -> None:
    for name, place in zip(("layer", "head"), places, strict=True):
        reel.page.select_option(f"#{name}", index=place)
    reel.settle()


def share(reel: Reel) -> str:
    """How much of the query's attention goes to the selected key block, as the page says it."""
    return reel.page.inner_text("#pair strong")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="a page of `attnplug trace view`")
    parser.add_argument("--number", help="what its text hides and its answer says")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--stills", type=Path, help="a folder for every frame as PNG")
    options = parser.parse_args(arguments)
    if (options.page is None) != (options.number is None):
        parser.error("--page and --number go together")
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        file, number = options.page, options.number
        if file is None:
            file, number = record_page(Path(folder))
        size = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_page(viewport=size, color_scheme="light")
        page.goto(file.resolve().as_uri())
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        reel = Reel(page)
        play(reel, number)
    frames = joined(reel.frames)
    write_gif(frames, options.out)
    if options.stills:
        options.stills.mkdir(parents=True, exist_ok=True)
        for place, (image, duration) in enumerate(frames):
            image.save(options.stills / f"{place:03}-{duration}.png")
    seconds = sum(duration for _, duration in frames) / 1000
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, {len(frames)} frames, {seconds} s")


if __name__ == "__main__":
    main()
