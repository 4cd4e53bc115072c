(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("data-of-figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 34rem)");
  const touch = window.matchMedia("(pointer: coarse)");
  const printWidth = 680;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const themed = (figure, paper) => {
    const ink = paper ? "#000000" : colour("--ink");
    const grid = paper ? "#dddddd" : colour("--grid");
    const faint = paper ? "#444444" : colour("--faint");
    const ground = paper ? "#ffffff" : colour("--raised");
    const layout = structuredClone(figure.layout);
    const small = narrow.matches && !paper;
    layout.font = { color: ink, size: small ? 11 : 12, family: "system-ui, 'DejaVu Sans', sans-serif" };
    layout.paper_bgcolor = "rgba(0,0,0,0)";
    layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.hoverlabel = { bgcolor: ground, bordercolor: faint, font: { color: ink }, align: "left" };
    layout.height = figure.height + (small ? figure.narrow : 0);
    layout.dragmode = touch.matches ? false : "zoom";
    layout.width = paper ? printWidth : undefined;
    layout.autosize = !paper;
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) {
        layout[key].gridcolor = grid;
        layout[key].zerolinecolor = grid;
        layout[key].linecolor = faint;
        layout[key].tickcolor = faint;
        if (small && key.startsWith("y") && layout[key].title) { layout[key].title.standoff = 4; }
      }
    }
    if (small) { layout.margin = Object.assign({}, layout.margin, { l: 8, r: 8 }); }
    for (const shape of layout.shapes || []) {
      if (shape.line && shape.line.color === "ink") { shape.line.color = ink; }
    }
    const traces = structuredClone(figure.traces);
    for (const trace of traces) {
      if (small && trace.marker && trace.marker.size > 9) { trace.marker.size *= 0.65; }
      for (const part of [trace.marker, trace.line, trace.marker && trace.marker.line, trace.error_y, trace.error_x, trace.textfont]) {
        if (part && part.color === "ink") { part.color = ink; }
      }
    }
    return [traces, layout];
  };

  const config = { responsive: true, displayModeBar: false };

  const drawOne = (figure, paper) => {
    const place = document.getElementById("plot-" + figure.name);
    const [traces, layout] = themed(figure, paper);
    return Plotly.react(place, traces, layout, config).then(() => {
      for (const node of place.querySelectorAll("svg")) { node.setAttribute("aria-hidden", "true"); }
    });
  };

  const drawForScreen = async () => {
    let drawn = 0;
    for (const figure of figures) {
      await drawOne(figure, false);
      // The browser may show what is there before the next plot is computed.
      await new Promise((next) => { window.setTimeout(next); });
      drawn += 1;
    }
    document.documentElement.dataset.drawn = String(drawn);
    document.documentElement.dataset.height = String(document.documentElement.scrollHeight);
  };

  // Printing waits for nothing, so every plot is asked for at once.
  const drawForPaper = () => { figures.map((figure) => drawOne(figure, true)); };

  const repaint = () => { drawForScreen(); };
  window.addEventListener("beforeprint", drawForPaper);
  window.addEventListener("afterprint", repaint);
  dark.addEventListener("change", repaint);
  narrow.addEventListener("change", repaint);

  const said = document.getElementById("said");
  const fallback = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of document.querySelectorAll("button[data-copies]")) {
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copies).textContent;
      let done = false;
      try {
        await navigator.clipboard.writeText(text);
        done = true;
      } catch (refused) {
        done = fallback(text);
      }
      button.textContent = done ? "Copied" : "Select and copy by hand";
      said.textContent = done ? "Copied " + button.getAttribute("aria-label").slice(5) : "The browser refused to copy";
      window.setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
  drawForScreen();
})();
