// Starts the drawing this script stands in; a page may hold many.
(function () {
  const here = document.currentScript && document.currentScript.parentElement;
  const roots = here && here.matches(".tfnb-page") ? [here] : document.querySelectorAll(".tfnb-page:not([data-on])");
  for (const root of roots) if (!("on" in root.dataset)) start(root);
  async function start(root) {
    root.dataset.on = "";
    const data = (name) => tfnbUnpacked(root.querySelector(`script.${name}`));
    const drawing = tfnbDrawing(root, { faces: await data("tfnb-faces") });
    const iterations = await data("tfnb-iterations"), sliders = iterations.loops && tfnbIterations(root, iterations);
    if (root.querySelector(".tfnb-timeline")) tfnbTimeline(root, drawing, sliders);
    root.dataset.on = "1";
  }
})();
