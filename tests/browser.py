"""Looks at a page of prope in headless Chromium."""

import html
import json
import pathlib
import re
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# The page's own policy forbids scripts, so a page around it measures it, in a frame of the wanted width and scheme.
AROUND = """<!DOCTYPE html><body style="margin: 0"><iframe srcdoc="{page}" style="width: {width}px; height: 3000px;
border: 0; color-scheme: {scheme}"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const page = frame.contentDocument, view = frame.contentWindow, width = page.documentElement.clientWidth;
  const shown = element => element.getClientRects().length > 0;
  const name = element => element.textContent.trim().slice(0, 60);
  const found = {{wider: page.documentElement.scrollWidth - width, scrolled: [], cut: [], fonts: [], outside: []}};
  for (const box of page.querySelectorAll(".scroll"))
    if (box.scrollWidth > box.clientWidth + 1) found.scrolled.push(name(box));
  for (const text of page.querySelectorAll("h1, h2, p, figcaption, summary"))
    if (shown(text) && !text.closest(".scroll") && text.getBoundingClientRect().right > width)
      found.cut.push(name(text));
  for (const svg of page.querySelectorAll("svg")) {{
    if (!shown(svg)) continue;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    for (const text of svg.querySelectorAll("text")) {{
      found.fonts.push(scale * parseFloat(view.getComputedStyle(text).fontSize));
      const at = text.getBoundingClientRect();
      if (at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1)
        found.outside.push(name(text));
    }}
  }}
  found.ground = view.getComputedStyle(page.body).backgroundColor;
  found.links = [...page.querySelectorAll("a")].map(link => link.getAttribute("href"));
  document.querySelector("pre").textContent = JSON.stringify(found);
}});
</script>"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Runs Chromium, without a window."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def look(page: pathlib.Path, folder: pathlib.Path, width: int, scheme: str) -> dict:
    """Measures a page at a width in CSS pixels, "light" or "dark".

    Returns:
      wider     pixels by which the page is wider than the window
      scrolled  boxes that are wider than the window and scroll
      cut       texts outside of such boxes that leave the window
      fonts     sizes of the labels of pictures, in pixels
      outside   labels that leave their picture
      ground    the background's colour
      links     the targets of links
      errors    what the console says
    """
    around = folder / f"{width}-{scheme}.html"
    around.write_text(AROUND.format(page=html.escape(page.read_text()), width=width, scheme=scheme))
    options = (f"--window-size={width},3000", "--virtual-time-budget=5000", "--enable-logging=stderr", "--v=0")
    done = run(*options, "--dump-dom", around.as_uri())
    found = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.DOTALL)[1]))
    return found | {"errors": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}
