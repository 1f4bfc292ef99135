// Starts the drawing this script stands in; a page may hold many.
(function () {
  const here = document.currentScript && document.currentScript.parentElement;
  const roots = here && here.matches(".tfnb-page") ? [here] : document.querySelectorAll(".tfnb-page:not([data-on])");
  for (const root of roots) {
    if (root.dataset.on) continue;
    root.dataset.on = "1";
    const data = root.querySelector('script[type="application/json"]');
    const drawing = tfnbDrawing(root, { faces: data ? JSON.parse(data.textContent) : {} });
    const iterations = root.querySelector("script.tfnb-iterations");
    const sliders = iterations && tfnbIterations(root, JSON.parse(iterations.textContent));
    if (root.querySelector(".tfnb-timeline")) tfnbTimeline(root, drawing, sliders);
  }
})();
