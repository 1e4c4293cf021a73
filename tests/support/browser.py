"""Opens pages of prope in headless Chromium."""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"Tab": 9, "Enter": 13}
SAID = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

MEASURE = """(() => {
  const width = document.documentElement.clientWidth;
  const name = element => element.textContent.trim().slice(0, 60);
  const isShown = element => element.getClientRects().length > 0 && name(element);
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const colour = text => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const luminance = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = rgb[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const background = element => getComputedStyle(element).backgroundColor;
  const contrast = text => {
    let ground = text;
    while (colour(background(ground))[3] < 255) ground = ground.parentElement;
    const both = [getComputedStyle(text).color, background(ground)].map(colour).map(luminance);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  const all = selector => [...document.querySelectorAll(selector)];
  const ids = all("[id]").map(element => element.id);
  const texts = "h1, h2, p, a, code, small, summary, figcaption, span, li, td, th";
  return {
    wider: document.documentElement.scrollWidth - width,
    scrolled: all(".scroll").filter(box => box.scrollWidth > box.clientWidth + 1).map(name),
    cut: all("h1, h2, p, figcaption, summary")
      .filter(text => isShown(text) && !text.closest(".scroll"))
      .filter(text => text.getBoundingClientRect().right > width).map(name),
    // Pictures are drawn with 150 pixels an inch, of 72 points.
    labels: all("img").map(image => 10 / 72 * 150 * image.clientWidth / image.naturalWidth),
    faint: all(texts).filter(isShown).filter(text => contrast(text) < 4.5).map(name),
    repeated: ids.filter((id, i) => ids.indexOf(id) < i),
    ground: background(document.body),
    links: all("a[href]").map(link => link.getAttribute("href")),
  };
})()"""


class Tab:
    """A page open in Chromium, with the reader's mouse and keyboard.

    It speaks the DevTools protocol over a pipe.
    """

    def __init__(self, folder: pathlib.Path):
        read, self.commands = os.pipe()
        self.events, write = os.pipe()
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        # The protocol wants the pipes' ends as files 3 and 4.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{read} 4>&{write}']
        self.process = subprocess.Popen(
            shell + command, pass_fds=(read, write), stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self.ids = itertools.count(1)
        self.buffer = b""
        self.errors = []
        self.session = {}
        targets = self.call("Target.getTargets")["targetInfos"]
        (page,) = [target for target in targets if target["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """Sends a command and waits for its answer.

        What the console says meanwhile goes to `errors`.
        """
        number = next(self.ids)
        message = {"id": number, "method": method, "params": params} | self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in SAID:
                self.errors.append(json.dumps(answer))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.buffer:
            content = os.read(self.events, 1 << 20)
            assert content, "Chromium ended"
            self.buffer += content
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def open(self, page: pathlib.Path, width: int, scheme: str = "light", target: str = "") -> None:
        """Opens a page; the others are those of `emulate` and an address on the page."""
        self.emulate(width, scheme)
        self.call("Page.navigate", url="about:blank")
        self.errors.clear()
        self.call("Page.navigate", url=page.as_uri() + target)
        limit = time.monotonic() + 60
        while self.ask("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < limit, "the page does not load"
            time.sleep(0.05)

    def emulate(self, width: int, scheme: str) -> None:
        """Shows the page at a width in CSS pixels, at 900 high, "light" or "dark"."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def ask(self, expression: str):
        """Returns the value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def measure(self) -> dict:
        """Measures the page.

        Returns:
          wider     pixels by which the page is wider than the window
          scrolled  boxes that are wider than the window and scroll
          cut       texts outside of such boxes that leave the window
          labels    heights of labels of 10 points in each picture, in pixels
          faint     texts whose contrast is below 4.5
          repeated  ids that more than one element has
          ground    the background's colour
          links     the targets of links
        """
        return self.ask(MEASURE)

    def press(self, *keys: str) -> None:
        """Presses keys such as Tab."""
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=KEYS[key],
                )

    def close(self) -> None:
        """Ends Chromium."""
        self.process.terminate()
        self.process.wait()
        os.close(self.commands)
        os.close(self.events)
