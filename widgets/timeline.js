// Links a timeline to the drawing above it: a bar lights its node, and a click brings it into view, in the iteration of the
// bar; a node lights its bars, and bars of iterations that no slider shows are pale.
function tfnbTimeline(root, drawing, iterations) {
  const svg = root.querySelector(".tfnb-timeline svg"), graph = root.querySelector("svg");
  const bars = [...svg.querySelectorAll("[data-box]")];
  const barAt = (event) => event.target.closest("[data-box]");
  const iterationOf = (bar) => (bar.dataset.iteration || "").split(" ").map(Number);  // loop, iteration
  svg.addEventListener("pointerover", (event) => drawing.point(barAt(event)?.dataset.box || ""));
  svg.addEventListener("pointerleave", () => drawing.point(""));
  svg.addEventListener("click", (event) => {
    const bar = barAt(event);
    if (!bar) return;
    if (iterations && bar.dataset.iteration) iterations.chooseIteration(...iterationOf(bar));
    drawing.reveal(bar.dataset.box);
  });
  const light = (box) => {
    const key = box && box.getAttribute("data-key");
    for (const bar of bars) {
      const inside = key && (bar.dataset.box === key || bar.dataset.box.startsWith(`${key}.`));
      bar.classList.toggle("lit", !!inside);
    }
  };
  graph.addEventListener("pointerover", (event) => light(event.target.closest(".box")));
  graph.addEventListener("pointerleave", () => light(null));
  iterations?.follow((shown) => {
    for (const bar of bars.filter((bar) => bar.dataset.iteration)) {
      const [loop, iteration] = iterationOf(bar), which = shown(loop);
      bar.classList.toggle("pale", !!which && !which.has(iteration));
    }
  });
}
