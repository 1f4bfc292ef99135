// Starts one drawing of a page.
async function tfnbStartPage(root) {
  const data = (name) => tfnbUnpacked(root.querySelector(`script.${name}`));
  const drawing = tfnbDrawing(root, { faces: await data("tfnb-faces") });
  const iterations = await data("tfnb-iterations"), sliders = iterations.loops && tfnbIterations(root, iterations);
  if (root.querySelector(".tfnb-timeline")) tfnbTimeline(root, drawing, sliders);
  root.dataset.on = "1";
}
