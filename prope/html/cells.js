// Reads out a cell of a map: the one pointed at or tapped, or the one that arrow keys move to in a focused picture.
for (const figure of document.querySelectorAll("[data-maps]")) {
  const maps = JSON.parse(figure.dataset.maps), box = figure.querySelector(".scroll"), drawing = box.firstElementChild;
  const output = document.createElement("output"), mark = document.createElement("i");
  let at = null;
  output.textContent = "Numbers: point at a cell or tap it, or focus the picture and press arrow keys.";
  box.after(output);
  box.setAttribute("role", "application");
  box.setAttribute("aria-description", drawing.querySelector("img").alt);
  const read = (map, row, column) => {
    const value = maps[map]?.values[row]?.split(" ")[column];
    if (!value) return false;
    const { title, names, labels: [rows, columns], box: [left, bottom, width, height] } = maps[map];
    const x = width / columns.length, y = height / rows.length, top = 1 - bottom - height;
    const corner = `left: ${100 * (left + column * x)}%; top: ${100 * (top + row * y)}%`;
    mark.style.cssText = `${corner}; width: ${100 * x}%; height: ${100 * y}%`;
    drawing.append(mark);
    output.textContent = `${names[0]} ${rows[row]}, ${names[1]} ${columns[column]}: ${value} (${title})`;
    output.className = "read";
    at = [map, row, column];
    return true;
  };
  const point = event => {
    const all = drawing.getBoundingClientRect();
    const x = (event.clientX - all.left) / all.width, y = (event.clientY - all.top) / all.height;
    maps.forEach(({ labels: [rows, columns], box: [left, bottom, width, height] }, map) => {
      const row = Math.floor((y - 1 + bottom + height) / height * rows.length);
      read(map, row, Math.floor((x - left) / width * columns.length));
    });
  };
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  box.addEventListener("keydown", event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [map, row, column] = at ?? [0, 0, 0], [down, right] = at ? step : [0, 0], beside = maps[map + right]?.values;
    if (!read(map, row + down, column + right) && right && beside) {
      const same = Math.min(row, beside.length - 1);
      read(map + right, same, right > 0 ? 0 : beside[same].split(" ").length - 1);
    }
    mark.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
