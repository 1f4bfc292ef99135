// Starts one drawing of a page.
async function tfnbStartPage(root) {
  const data = (name) => tfnbUnpacked(root.querySelector(`:scope > script.${name}`));
  const drawing = tfnbDrawing(root, { faces: await data("tfnb-faces") });
  const iterations = await data("tfnb-iterations"), sliders = iterations.loops && tfnbIterations(root, iterations);
  if (root.querySelector(".tfnb-timeline")) tfnbTimeline(root, drawing, sliders);
  tfnbWithoutKernel(root);
  root.dataset.on = "1";
}
// In a notebook opened again the live view below this drawing has no kernel any more: JupyterLab's message is no news.
function tfnbWithoutKernel(root, seconds = 30) {
  const below = root.closest(".jp-OutputArea-child")?.nextElementSibling;
  if (below?.textContent.trim() === "Error displaying widget: model not found") below.style.display = "none";
  else if (seconds) setTimeout(tfnbWithoutKernel, 1000, root, seconds - 1);
}
