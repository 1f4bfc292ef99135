// Unpacks the script and style of the page that this script is in, and starts its drawing; one output unpacks for all.
// A front end that runs scripts elsewhere (in the document's head) shows the picture: what is in the document may be a
// stranger's, so the page is never searched for.
(async function (page) {
  const code = page?.matches(".tfnb-page:not([data-on])") && page.querySelector(":scope > script.tfnb-code");
  if (!code || !window.DecompressionStream) return;
  page.dataset.on = "";
  const { name } = code.dataset, known = (window.tfnbStart ||= {}), one = (known[name] ||= {});
  async function unpacked() {
    const bytes = Uint8Array.from(atob(code.textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const { script: text, style } = JSON.parse(await new Response(stream).text());
    const add = (tag, words) => { document.head.appendChild(document.createElement(tag)).textContent = words; };
    add("style", style);
    add("script", `window.tfnbStart["${name}"].run = (() => {${text}\nreturn tfnbStartPage;})();`);
  }
  await (one.ready ||= unpacked());
  one.run(page);
})(document.currentScript?.parentElement);
