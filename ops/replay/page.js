"use strict";
// Draws the charts of one replay report from the JSON in the page. No libraries, nothing is fetched.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const runs = report.runs.map((run, index) => ({ ...run, color: `var(--run-${index % 8})`, dash: index > 7 ? "5 3" : "", shown: true }));
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 210, LEFT = 52, RIGHT = 16, TOP = 8, BOTTOM = 26, APART = 64;
  const STATES = ["waiting", "prefill", "decode", "preempted"];
  const redraws = [];

  function svg(name, attributes, parent) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.appendChild(node);
    return node;
  }

  function html(name, parent, text, className) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    if (parent) parent.appendChild(node);
    return node;
  }

  function figure(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  }

  function key(parent, color, text, kind = "span") {
    const item = html(kind, parent);
    html("i", item, "", "key").style.background = color;
    item.appendChild(document.createTextNode(text));
    return item;
  }

  // --- the tooltip ---

  const tip = document.getElementById("tip");

  function showTip(event, title, lines, sentences = []) {
    tip.replaceChildren();
    html("strong", tip, title);
    for (const [color, name, value] of lines) {
      const line = html("div", tip);
      html("i", line, "", "key").style.background = color;
      html("span", line, name);
      html("b", line, value);
    }
    for (const sentence of sentences) html("p", tip, sentence);
    tip.hidden = false;
    const room = document.documentElement.clientWidth;
    const left = event.clientX + 16 + tip.offsetWidth > room ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16;
    tip.style.left = `${Math.max(4, left) + window.scrollX}px`;
    tip.style.top = `${event.clientY + window.scrollY + 14}px`;
  }

  const hideTip = () => { tip.hidden = true; };

  // A drawing as wide as its place: text keeps its size on a phone. Drawn anew whenever that width changes.
  function fitted(host, draw) {
    let drawn = 0;
    const redraw = () => {
      drawn = host.clientWidth;
      host.replaceChildren();
      if (drawn) draw(Math.max(drawn, 240));
    };
    redraws.push(redraw);
    new ResizeObserver(() => requestAnimationFrame(() => { if (host.clientWidth !== drawn) redraw(); })).observe(host);
    redraw();
  }

  // Of these ticks as many as have room side by side.
  function spaced(ticks, width) {
    const every = Math.ceil(ticks.length / Math.max(1, Math.floor(width / APART)));
    return ticks.filter((_, index) => index % every === 0);
  }

  // --- scales ---

  function linear(most) {
    const top = most > 0 ? most : 1;
    const rough = top / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const ticks = [];
    for (let n = 0; n <= Math.ceil(top / step - 1e-9); n++) ticks.push(n * step);
    const end = ticks[ticks.length - 1];
    return { ticks, at: (value) => value / end, value: (share) => share * end };
  }

  function time(most) {
    const scale = linear(most);
    return { ticks: scale.ticks.filter((tick) => tick <= most), at: (value) => value / most, value: (share) => share * most };
  }

  function logarithmic(least, most) {
    const low = Math.floor(Math.log10(least)), high = Math.max(low + 1, Math.ceil(Math.log10(most)));
    const ticks = [];
    for (let n = low; n <= high; n++) ticks.push(10 ** n);
    return {
      ticks,
      at: (value) => Math.min(1, Math.max(0, (Math.log10(Math.max(value, 1e-12)) - low) / (high - low))),
      value: (share) => 10 ** (low + share * (high - low)),
    };
  }

  // --- one chart: lines over an x axis, a crosshair that reads them all ---

  function chart(parent, title, spec) {
    const card = html("div", parent, undefined, "card");
    html("h3", card, title);
    const host = html("div", card);
    fitted(host, (width) => {
      const lines = spec.lines();
      if (spec.empty && !lines.length) { html("p", host, spec.empty, "soft"); return; }
      const { x, y } = spec.scales(lines);
      const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title }, host);
      const px = (value) => LEFT + x.at(value) * (width - LEFT - RIGHT);
      const py = (value) => HEIGHT - BOTTOM - y.at(value) * (HEIGHT - TOP - BOTTOM);
      for (const tick of y.ticks) {
        svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: py(tick), y2: py(tick) }, root);
        svg("text", { x: LEFT - 7, y: py(tick) + 4, "text-anchor": "end" }, root).textContent = spec.yText(tick);
      }
      svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }, root);
      for (const tick of spaced(x.ticks, width - LEFT - RIGHT)) {
        const anchor = px(tick) > width - APART / 2 ? "end" : "middle";
        svg("text", { x: anchor === "end" ? width : px(tick), y: HEIGHT - 8, "text-anchor": anchor }, root).textContent = spec.xText(tick);
      }
      for (const mark of spec.marks || []) {
        svg("line", { class: "slo", x1: px(mark), x2: px(mark), y1: TOP, y2: HEIGHT - BOTTOM }, root);
      }
      for (const line of lines) {
        const points = line.points.map(([a, b]) => `${px(a).toFixed(1)},${py(b).toFixed(1)}`).join(" ");
        svg("polyline", { class: "curve", points, "stroke-dasharray": line.dash, style: `stroke: ${line.color}` }, root);
      }
      const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, root);
      root.addEventListener("pointermove", (event) => {
        const box = root.getBoundingClientRect();
        const share = ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT);
        if (share < 0 || share > 1) { hideTip(); cross.setAttribute("visibility", "hidden"); return; }
        const value = x.value(share);
        cross.setAttribute("x1", px(value));
        cross.setAttribute("x2", px(value));
        cross.setAttribute("visibility", "visible");
        showTip(event, spec.xText(value), lines.map((line) => [line.color, line.name, spec.read(line, value)]));
      });
      root.addEventListener("pointerleave", () => { hideTip(); cross.setAttribute("visibility", "hidden"); });
    });
  }

  const seconds = (value) => `${figure(value)} s`;
  const percent = (value) => `${figure(value * 100)} %`;
  const visible = () => runs.filter((run) => run.shown);
  const longest = () => Math.max(1e-9, ...runs.map((run) => run.series.width_s * run.series.running.length));

  function overTime(parent, title, lines, yText, top, empty) {
    chart(parent, title, {
      lines,
      scales: (drawn) => ({
        x: time(longest()),
        y: linear(top || Math.max(0, ...drawn.flatMap((line) => line.points.map((point) => point[1])))),
      }),
      xText: seconds,
      yText,
      empty,
      read: (line, value) => {
        const point = line.points[Math.floor(value / line.width)];
        return point ? yText(point[1]) : "–";
      },
    });
  }

  // Neighbours averaged until MOST points are left: a rate over a few milliseconds is noise.
  const MOST = 120;
  function calmed(values) {
    const size = Math.ceil(values.length / MOST), means = [];
    for (let start = 0; start < values.length; start += size) {
      const part = values.slice(start, start + size);
      means.push(part.reduce((sum, value) => sum + value, 0) / part.length);
    }
    return { size, means };
  }

  function along(run, raw, name = run.name, color = run.color) {
    const { size, means: values } = calmed(raw);
    const width = run.series.width_s * size;
    return { name, color, dash: run.dash, width, points: values.map((value, index) => [(index + 0.5) * width, value]) };
  }

  function drawSeries() {
    const parent = document.getElementById("series");
    const perSecond = (run, values) => values.map((value) => value / run.series.width_s);
    const charts = [
      ["Requests running", (run) => run.series.running, figure],
      ["Requests waiting", (run) => run.series.waiting, figure],
      ["KV pool in use", (run) => run.series.used, percent, 1],
      ["Requests completed within the objectives, per second", (run) => perSecond(run, run.series.in_slo), figure],
      ["Requests completed per second", (run) => perSecond(run, run.series.completed), figure],
      ["Output tokens per second", (run) => run.series.outputs_per_s, figure],
      ["Tokens computed per second", (run) => run.series.computed_per_s, figure],
      ["Mean step, ms", (run) => run.series.step_ms, figure],
      ["Preemptions per second", (run) => perSecond(run, run.series.preemptions), figure],
    ];
    if (runs.some((run) => run.series.ratio.length)) charts.push(["Reserved share of output limits", (run) => run.series.ratio, figure]);
    for (const [title, values, text, top] of charts) {
      overTime(parent, title, () => visible().filter((run) => values(run).length).map((run) => along(run, values(run))), text, top);
    }
  }

  // --- distributions ---

  function drawCurves() {
    const parent = document.getElementById("curves");
    const slo = runs[0].goodput;
    const charts = [
      ["Time to first token", "ttft_s", seconds, [slo.slo_ttft_s]],
      ["Time per output token", "tpot_ms", (value) => `${figure(value)} ms`, [slo.slo_tpot_s * 1000]],
      ["End to end", "e2e_s", seconds, []],
      ["Wait for admission", "queue_s", seconds, []],
    ];
    for (const [title, name, xText, marks] of charts) {
      const all = runs.flatMap((run) => run.curves[name]).concat(marks).filter((value) => value > 0);
      if (!all.length) continue;
      chart(parent, title, {
        lines: () => visible().filter((run) => run.curves[name].length).map((run) => {
          const values = run.curves[name];
          return { name: run.name, color: run.color, dash: run.dash, values, points: values.map((value, index) => [value, index / (values.length - 1)]) };
        }),
        scales: () => ({ x: logarithmic(Math.max(Math.min(...all), Math.max(...all) / 1e6), Math.max(...all)), y: linear(1) }),
        xText,
        yText: percent,
        marks,
        read: (line, value) => percent(line.values.filter((one) => one <= value).length / line.values.length),
      });
    }
  }

  // --- admission ---

  function drawHeld() {
    const tests = [...new Set(runs.flatMap((run) => Object.keys(run.series.held)))];
    const color = (test) => `var(--run-${(tests.indexOf(test) + 3) % 8})`;
    for (const test of tests) key(document.getElementById("tests"), color(test), test);
    for (const run of runs) {
      const lines = () => Object.entries(run.series.held).map(([test, values]) => ({ ...along(run, values, test, color(test)), dash: "" }));
      overTime(document.getElementById("held"), run.name, lines, percent, 1, "Nothing held it.");
    }
  }

  // --- lives of requests ---

  function drawLanes() {
    for (const state of STATES) key(document.getElementById("states"), `var(--${state})`, state);
    for (const run of runs) {
      const box = html("details", document.getElementById("lanes"), undefined, "card");
      box.style.marginBottom = "12px";
      box.open = run === runs[0] || runs.length < 4;
      html("summary", box, run.name);
      fitted(html("div", box), (width) => gantt(box.lastChild, run, width));
    }
  }

  function gantt(parent, run, wide) {
    const left = 14, right = 20, high = 8, bottom = 24;
    const end = Math.max(1e-9, ...run.lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
    const height = run.lanes.length * high + bottom;
    const scale = time(end), px = (value) => left + scale.at(value) * (wide - left - right);
    const root = svg("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `Requests of ${run.name}` }, parent);
    for (const tick of spaced(scale.ticks, wide - left - right)) {
      svg("line", { class: "gridline", x1: px(tick), x2: px(tick), y1: 0, y2: height - bottom }, root);
      svg("text", { x: px(tick), y: height - 7, "text-anchor": "middle" }, root).textContent = seconds(tick);
    }
    run.lanes.forEach((lane, row) => {
      const group = svg("g", { class: "lane" }, root), y = row * high;
      svg("rect", { x: left, y, width: wide - left - right, height: high, fill: "transparent" }, group);
      for (const [state, from, to] of lane.spans) {
        svg("rect", { x: px(from), y: y + 1, width: Math.max(px(to) - px(from), 0.6), height: high - 2, style: `fill: var(--${state})` }, group);
      }
      const last = lane.spans[lane.spans.length - 1];
      if (last) {
        const mark = svg("text", { x: px(last[2]) + 3, y: y + high - 0.5, style: `font-size: 9px; fill: var(--${lane.in_slo ? "met" : "missed"})` }, group);
        mark.textContent = lane.in_slo ? "●" : "×";
      }
      group.addEventListener("pointermove", (event) => {
        const lines = lane.spans.slice(0, 12).map(([state, from, to]) => [`var(--${state})`, `${state} from ${seconds(from)}`, seconds(to - from)]);
        if (lane.spans.length > 12) lines.push(["transparent", `and ${lane.spans.length - 12} more`, ""]);
        const verdict = `${lane.end || "no end"}, ${lane.in_slo ? "within" : "not within"} the objectives`;
        showTip(event, `Request ${lane.id}: ${lane.prompt} in, ${lane.outputs} out (${verdict})`, lines, lane.why);
      });
      group.addEventListener("pointerleave", hideTip);
    });
  }

  for (const run of runs) {
    const label = key(document.getElementById("runs"), run.color, run.name, "label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => { run.shown = box.checked; redraws.forEach((draw) => draw()); });
    label.prepend(box);
  }
  drawSeries();
  drawCurves();
  drawHeld();
  drawLanes();
})();
