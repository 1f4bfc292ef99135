// Unpacks the script and style of this output and starts its drawings; what another output has unpacked is not unpacked again.
(function () {
  const here = document.currentScript && document.currentScript.parentElement;
  const roots = here && here.matches(".tfnb-page") ? [here] : document.querySelectorAll(".tfnb-page:not([data-on])");
  const known = (window.tfnbStart ||= {});
  async function unpacked(script) {
    const bytes = Uint8Array.from(atob(script.textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const { script: text, style } = JSON.parse(await new Response(stream).text());
    const add = (tag, words) => { document.head.appendChild(document.createElement(tag)).textContent = words; };
    add("style", style);
    add("script", `window.tfnbStart["${script.dataset.name}"].run = (() => {${text}\nreturn tfnbStartPage;})();`);
  }
  for (const root of roots) {
    const code = root.querySelector(".tfnb-code");
    if (!code || "on" in root.dataset || !window.DecompressionStream) continue;
    root.dataset.on = "";
    const one = (known[code.dataset.name] ||= {});
    one.ready ||= unpacked(code);
    one.ready.then(() => one.run(root));
  }
})();
