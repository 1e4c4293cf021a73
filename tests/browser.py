"""Looks at a page of prope in headless Chromium."""

import base64
import html
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import matplotlib.figure
import pytest

from prope.html import drawing

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

# The page's own policy forbids scripts but its own, so a page around it measures it, in a frame of the wanted width and
# scheme.
AROUND = """<!DOCTYPE html><body style="margin: 0"><iframe srcdoc="{page}" style="width: {width}px; height: 3000px;
border: 0; color-scheme: {scheme}"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
  const shown = element => element.getClientRects().length > 0;
  const name = element => element.textContent.trim().slice(0, 60);
  const found = {{wider: page.documentElement.scrollWidth - width, scrolled: [], cut: [], labels: [], faint: []}};
  for (const box of page.querySelectorAll(".scroll"))
    if (box.scrollWidth > box.clientWidth + 1) found.scrolled.push(name(box));
  for (const text of page.querySelectorAll("h1, h2, p, figcaption, summary"))
    if (shown(text) && !text.closest(".scroll") && text.getBoundingClientRect().right > width)
      found.cut.push(name(text));
  for (const image of page.querySelectorAll("img"))  // drawn with 150 pixels an inch
    found.labels.push(10 / 72 * 150 * image.clientWidth / image.naturalWidth);
  const pen = document.createElement("canvas").getContext("2d", {{willReadFrequently: true}});
  const colour = text => {{
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  }};
  const luminance = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {{
    const c = rgb[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }}, 0);
  const texts = "h1, h2, p, a, code, small, output, summary, figcaption, span, li, td, th";
  for (const text of page.querySelectorAll(texts)) {{
    const style = view.getComputedStyle(text);
    if (!shown(text) || !name(text)) continue;
    let ground = text;
    while (colour(view.getComputedStyle(ground).backgroundColor)[3] < 255) ground = ground.parentElement;
    const both = [style.color, view.getComputedStyle(ground).backgroundColor];
    const [low, high] = both.map(colour).map(luminance).sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.faint.push(name(text) + " " + ratio.toFixed(2));
  }}
  const ids = [...page.querySelectorAll("[id]")].map(element => element.id);
  found.repeated = ids.filter((id, i) => ids.indexOf(id) < i);
  found.ground = view.getComputedStyle(page.body).backgroundColor;
  found.links = [...page.querySelectorAll("a[href]")].map(link => link.getAttribute("href"));
  document.querySelector("pre").textContent = JSON.stringify(found);
}});
</script>"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Runs Chromium, without a window."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def look(page: pathlib.Path, folder: pathlib.Path, width: int, scheme: str) -> dict:
    """Measures a page at a width in CSS pixels, "light" or "dark".

    Returns:
      wider     pixels by which the page is wider than the window
      scrolled  boxes that are wider than the window and scroll
      cut       texts outside of such boxes that leave the window
      labels    heights of labels of 10 points in each picture, in pixels
      faint     texts whose contrast is below 4.5
      repeated  ids that more than one element has
      ground    the background's colour
      links     the targets of links
      errors    what the console says
    """
    around = folder / f"{width}-{scheme}.html"
    around.write_text(AROUND.format(page=html.escape(page.read_text()), width=width, scheme=scheme))
    options = (
        f"--window-size={width},3000",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--v=0",
    )
    done = run(*options, "--dump-dom", around.as_uri())
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.DOTALL)[1]))
    return found | {"errors": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}


def measure_labels(picture) -> dict:
    """Draws a picture and measures its labels.

    Returns:
      texts        of all labels
      smallest     size of the smallest label, in points
      outside      labels that leave the picture
      overlapping  pairs of labels that lie on one another
    """
    drawn = []
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(drawing.STYLE):
        figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
        picture.draw(figure)
        patch.setattr(matplotlib.text.Text, "draw", lambda text, renderer: drawn.append(text))
        figure.draw_without_rendering()
    labels = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes = []
    for text in labels:
        box = text.get_window_extent()
        ink = 0.12 * min(box.width, box.height)  # boxes are higher than letters
        boxes.append((text.get_text(), box.padded(-ink)))
    left, bottom, right, top = figure.bbox.padded(1).extents
    return {
        "texts": [name for name, _ in boxes],
        "smallest": min(text.get_fontsize() for text in labels),
        "outside": [
            name
            for name, box in boxes
            if box.x0 < left or box.x1 > right or box.y0 < bottom or box.y1 > top
        ],
        "overlapping": [
            f"{name} | {other}"
            for (name, box), (other, other_box) in itertools.combinations(boxes, 2)
            if box.overlaps(other_box)
        ],
    }


class Tab:
    """A page open in Chromium, with the reader's mouse and keyboard, by the DevTools protocol over a pipe."""

    def __init__(self, folder: pathlib.Path):
        (read, commands), (self.events, write) = os.pipe(), os.pipe()
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
        )
        shell = f'exec "$0" "$@" 3<&{read} 4>&{write}'  # where the protocol wants the pipe's ends
        command = [
            "bash",
            "-c",
            shell,
            CHROMIUM,
            *options,
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self.process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self.commands, self.ids, self.session, self.buffer, self.errors = (
            commands,
            itertools.count(1),
            None,
            b"",
            [],
        )
        (page,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """Sends a command and waits for its answer; what the console says meanwhile goes to `errors`."""
        message = {"id": next(self.ids), "method": method, "params": params}
        os.write(
            self.commands,
            json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        while True:
            while b"\0" not in self.buffer:
                part = os.read(self.events, 1 << 20)
                assert part, "Chromium ended"
                self.buffer += part
            text, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.errors.append(text.decode())
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: pathlib.Path, width: int, scheme: str = "light", target: str = "") -> None:
        """Opens a page at a width in CSS pixels, at 900 high, "light" or "dark"."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call("Page.navigate", url="about:blank")
        self.errors.clear()
        self.call("Page.navigate", url=page.as_uri() + target)
        limit = time.monotonic() + 60
        while self.ask("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < limit, "the page does not load"
            time.sleep(0.05)

    def ask(self, expression: str):
        """Returns the value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Presses keys such as Tab or ArrowRight."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=codes[key],
                )

    def move(self, x: float, y: float) -> None:
        """Moves the mouse, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """Taps the screen with a finger."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, path: pathlib.Path) -> None:
        """Writes a picture of the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=size | {"scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Ends Chromium."""
        self.process.terminate()
        self.process.wait()
        os.close(self.commands)
        os.close(self.events)
