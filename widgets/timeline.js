// Links a timeline to the drawing above it: a bar lights its node and a click brings it into view; a node lights its
// bars.
function tfnbTimeline(root, drawing) {
  const svg = root.querySelector(".tfnb-timeline svg"), graph = root.querySelector("svg");
  const bars = [...svg.querySelectorAll("[data-box]")];
  const keyAt = (event) => event.target.closest("[data-box]")?.dataset.box || "";
  svg.addEventListener("pointerover", (event) => drawing.point(keyAt(event)));
  svg.addEventListener("pointerleave", () => drawing.point(""));
  svg.addEventListener("click", (event) => { if (keyAt(event)) drawing.reveal(keyAt(event)); });
  const light = (box) => {
    const key = box && box.getAttribute("data-key");
    for (const bar of bars) {
      const inside = key && (bar.dataset.box === key || bar.dataset.box.startsWith(`${key}.`));
      bar.classList.toggle("lit", !!inside);
    }
  };
  graph.addEventListener("pointerover", (event) => light(event.target.closest(".box")));
  graph.addEventListener("pointerleave", () => light(null));
}
