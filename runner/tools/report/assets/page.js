"use strict";
// Replaces the static curves by interactive ones, and follows a run in progress. Texts are inserted
// as text, never as markup, except for markup that the live page's server made and escaped.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const FONT = "12px system-ui, sans-serif";
  const group = new Intl.NumberFormat("en-US");
  const views = [];

  // -- numbers -------------------------------------------------------------------------------

  const sum = (differences) => {
    let at = 0;
    return differences.map((one) => (at += one));
  };

  function short(value) {
    if (value === null || value === undefined) return "-";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e4) {
      for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
        if (size >= factor) return Number((value / factor).toPrecision(3)) + unit;
      }
    }
    return size >= 1e-3 ? String(Number(value.toPrecision(4))) : Number(value.toPrecision(4)).toExponential();
  }

  // The last index whose value is not above the wanted one.
  function place(sorted, wanted) {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (sorted[middle] <= wanted) low = middle; else high = middle - 1;
    }
    return low;
  }

  // As in runner/tools/report/drawing.py: all values except outliers that would flatten the rest.
  function bounds(values, isLog) {
    const known = values.filter((v) => v !== null && (!isLog || v > 0)).map((v) => (isLog ? Math.log10(v) : v));
    if (!known.length) return null;
    known.sort((a, b) => a - b);
    let low = known[0], high = known[known.length - 1];
    const usual = known[Math.min(known.length - 1, Math.floor(0.98 * known.length))];
    if (usual > low && high - low > 6 * (usual - low)) high = usual + (usual - low) * 0.5;
    if (high <= low) {
      const room = Math.max(1e-9, Math.abs(low) * 0.05);
      low -= room; high += room;
    }
    const room = 0.05 * (high - low);
    low = isLog || low - room > 0 || low <= 0 ? low - room : low;
    high += room;
    return isLog ? [10 ** low, 10 ** high] : [low, high];
  }

  // -- charts --------------------------------------------------------------------------------

  const axis = (size, more) => ({
    font: FONT, stroke: () => css("--ink-2"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid") }, size, ...more,
  });

  function draw(figure, options, columns) {
    const chart = new uPlot({ width: Math.floor(figure.clientWidth) || 600, legend: { show: false }, ...options }, columns, figure);
    figure.classList.add("drawn");
    figure.chart = chart;
    new ResizeObserver(() => {
      const width = Math.floor(figure.clientWidth);
      if (width > 0 && width !== chart.width) chart.setSize({ width, height: chart.height });
    }).observe(figure);
    return chart;
  }

  function withKeys(figure, label, act) {
    figure.tabIndex = 0;
    figure.setAttribute("role", "group");
    figure.setAttribute("aria-label", label);
    figure.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.altKey && !event.metaKey && act(event.key)) event.preventDefault();
    });
  }

  // A labelled input in a box of controls.
  function input(box, words, attributes, choices) {
    const label = document.createElement("label"), one = document.createElement(choices ? "select" : "input");
    for (const choice of choices ?? []) one.append(new Option(choice, choice));
    Object.assign(one, attributes);
    label.append(words, one);
    box.append(label);
    return one;
  }

  // An exponential average of points, corrected for its beginning (as Adam is).
  function average(points, weight) {
    let sum = 0, count = 0;
    return points.map(([at, value]) => {
      sum = weight * sum + (1 - weight) * value;
      count = weight * count + (1 - weight);
      return [at, sum / count];
    });
  }

  // By the wheel with Ctrl (a trackpad's pinch) or on a focused chart, and by two fingers.
  function zoomable(chart, act) {
    const over = chart.over, fingers = new Map();
    const share = (x) => (x - over.getBoundingClientRect().left) / over.clientWidth;
    over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !chart.root.parentElement.contains(document.activeElement)) return;
      event.preventDefault();
      act(event.deltaY < 0 ? 0.8 : 1.25, share(event.clientX));
    }, { passive: false });
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX);
    });
    over.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const apart = () => { const [one, other] = fingers.values(); return Math.max(10, Math.abs(one - other)); };
      const before = fingers.size === 2 && apart();
      fingers.set(event.pointerId, event.clientX);
      if (before) act(before / apart(), share(([...fingers.values()][0] + [...fingers.values()][1]) / 2));
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) over.addEventListener(name, (event) => fingers.delete(event.pointerId));
    return chart;
  }

  // A view made wider or narrower around a share of its width, which stays where it is.
  function scaled({ min, max }, factor, share) {
    const at = min + share * (max - min);
    return { min: at - (at - min) * factor, max: at + (max - at) * factor };
  }

  function trace(pen, ...points) {
    pen.beginPath();
    points.forEach(([x, y], at) => (at ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  }

  function triangle(pen, x, y, arm, height) {
    trace(pen, [x, y], [x + arm, y + height], [x - arm, y + height]);
    pen.fill();
  }

  // Draws within the plot, or so many pixels around it.
  function within(u, around, over, paint) {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left - around, over ? 0 : top, width + 2 * around, height + around + (over ? top : 0));
    u.ctx.clip();
    paint(u.ctx);
    u.ctx.restore();
  }

  // -- one run -------------------------------------------------------------------------------

  const TITLES = { loss: "loss", grad_norm: "grad norm", lr: "lr", tokens_per_second: "tokens/s" };
  const LIMITS = { loss: "loss_limit", grad_norm: "norm_limit" };
  const COLUMNS = ["loss", "grad_norm", "lr", "tokens_per_second", "loss_limit", "norm_limit"];

  class RunView {
    constructor(section, told) {
      this.section = section;
      this.number = section.dataset.run;
      this.charts = [];
      this.whole = true;
      this.isLog = { grad_norm: true };
      this.weight = 0; // of the past in the smooth line
      this.take(told);
      this.readout = section.querySelector(".readout");
      this.readout.hidden = false;
      this.readout.setAttribute("aria-live", "polite");
      this.addControls(section.querySelector(".controls"));
      for (const figure of section.querySelectorAll("figure.chart")) this.addChart(figure);
    }

    take(told) {
      this.generation = told.generation;
      this.attempts = told.attempts;
      this.attempt = sum(told.rows.attempt);
      this.step = sum(told.rows.step);
      this.columns = {};
      for (const name of COLUMNS) this.columns[name] = told.rows[name];
      this.titles = { ...TITLES, tokens_per_second: `${told.counted}/s` };
      this.odd = new Map(told.rows.odd.map(([at, action, verdict]) => [at, [action, verdict]]));
      this.setMarks(told);
    }

    setMarks(told) {
      this.means = told.means;
      this.evaluations = told.evaluations;
      this.marks = told.marks;
      this.incidents = told.incidents;
      this.ring = told.ring;
    }

    // New rows; the first one may be known already.
    append(told) {
      const attempts = sum(told.rows.attempt), steps = sum(told.rows.step);
      const fresh = attempts.findIndex((one) => one > this.attempt[this.attempt.length - 1]);
      if (fresh >= 0) {
        const before = this.attempt.length;
        for (const [at, action, verdict] of told.rows.odd) {
          if (at >= fresh) this.odd.set(before + at - fresh, [action, verdict]);
        }
        this.attempt.push(...attempts.slice(fresh));
        this.step.push(...steps.slice(fresh));
        for (const name of COLUMNS) this.columns[name].push(...told.rows[name].slice(fresh));
      }
      this.attempts = told.attempts;
      this.setMarks(told);
    }

    isApplied(at) {
      const odd = this.odd.get(at);
      return !odd || odd[0] === "apply";
    }

    applied(name) {
      const values = this.columns[name];
      return values.map((value, at) => (this.isApplied(at) ? value : null));
    }

    stepAt(attempt) {
      const at = place(this.attempt, attempt);
      const ahead = Math.max(0, Math.round(attempt) - this.attempt[at]);
      return this.step[at] + Math.min(ahead, Math.max(0, (this.step[at + 1] ?? this.step[at]) - this.step[at]));
    }

    addControls(box) {
      box.hidden = false;
      const add = (words, act) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = words;
        button.addEventListener("click", act);
        box.append(button);
      };
      const end = () => this.attempt[this.attempt.length - 1];
      add("whole run", () => this.zoomOut());
      if (end() > 1500) add("last 1,000", () => this.zoom(end() - 1000, end()));
      add("closer", () => this.scale(0.5));
      add("further", () => this.scale(2));
      const log = input(box, "log scale", { type: "checkbox" });
      log.addEventListener("change", () => { this.isLog.loss = log.checked; this.rebuild(); });
      const smooth = input(box, "smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
      smooth.addEventListener("input", () => { this.weight = Number(smooth.value); this.refresh(); });
      const hint = document.createElement("span");
      hint.className = "note";
      hint.textContent = "Zoom: drag, pinch, or the wheel with Ctrl or on a chosen chart. Keys on a chart: arrows, + and -, 0 for the whole run.";
      box.append(hint);
    }

    range() {
      const last = Math.max(1, this.attempt[this.attempt.length - 1]);
      return [0, last];
    }

    zoomOut() {
      this.zoom(...this.range());
      this.whole = true;
    }

    zoom(from, to) {
      const [first, last] = this.range();
      const width = Math.max(4, to - from);
      const min = Math.max(first, Math.min(from, last - Math.min(width, last - first)));
      const max = Math.min(last, min + width);
      this.whole = min <= first && max >= last;
      this.setting = true;
      for (const chart of this.charts) chart.setScale("x", { min, max });
      this.setting = false;
      const isDense = this.isDense();
      if (this.means.length && this.wasDense !== isDense) {
        this.wasDense = isDense;
        this.refresh();
      }
    }

    scale(factor, share = 0.5) {
      const { min, max } = scaled(this.charts[0].scales.x, factor, share);
      this.zoom(min, max);
    }

    make(figure) {
      const name = figure.dataset.curve, chart = draw(figure, this.options(name, this.isLog[name] ?? false), this.series(name));
      return zoomable(chart, (factor, share) => this.scale(factor, share));
    }

    addChart(figure) {
      const name = figure.dataset.curve;
      this.charts.push(this.make(figure));
      withKeys(figure, `${this.titles[name]} over attempted steps`, (key) => this.key(key, figure.chart));
    }

    // The scale of a chart cannot be exchanged: the loss is drawn anew.
    rebuild() {
      const at = this.charts.findIndex((one) => one.root.parentElement.dataset.curve === "loss");
      const old = this.charts[at], figure = old.root.parentElement, { min, max } = old.scales.x, whole = this.whole;
      old.destroy();
      this.charts[at] = this.make(figure);
      this.zoom(min, max);
      this.whole = whole;
    }

    series(name) {
      return [this.attempt, this.applied(name), this.smooth(name)];
    }

    // The mean of each column, or of a close view each step, with the past by its weight.
    smooth(name) {
      const at = ["loss", "grad_norm"].indexOf(name), isMeans = this.isDense();
      if (at < 0 || (!this.weight && !isMeans)) return this.attempt.map(() => null);
      const points = isMeans ? this.means.map((one) => [one[0], one[at + 1]]) : this.attempt.map((one, place) => [one, this.isApplied(place) ? this.columns[name][place] : null]);
      const known = average(points.filter((one) => one[1] !== null), this.weight);
      const values = this.attempt.map(() => null);
      for (const [attempt, value] of known) values[place(this.attempt, attempt)] = value;
      return values;
    }

    // Whether the steps in view are columns: their extremes are then a band, not a line.
    isDense() {
      if (!this.means.length) return false;
      const { min, max } = this.charts[0]?.scales.x ?? {};
      if (min === undefined || min === null) return true;
      return max - min > 1.2 * (place(this.attempt, max) - place(this.attempt, min));
    }

    options(name, isLog) {
      return {
        height: name === "loss" ? (innerWidth < 620 ? 190 : 260) : name === "grad_norm" ? 210 : 150,
        padding: [name === "loss" ? 26 : 10, 30, 0, 0], // the last label needs its half
        cursor: {
          sync: { key: `run${this.number}` },
          drag: { x: true, y: false },
          points: { size: 8, fill: () => css("--blue"), stroke: () => css("--paper") },
          y: false,
        },
        scales: {
          x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
          y: { distr: isLog ? 3 : 1, range: (u) => this.height(u, name, isLog) },
        },
        axes: [
          axis(32, {
            space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7],
            values: (u, splits) => splits.map((v) => group.format(this.stepAt(v))),
          }),
          axis(72, {
            space: 28, values: (u, splits) => splits.map(short), ...(isLog ? { splits: logSplits } : {}),
          }),
        ],
        series: [{}, { stroke: () => (this.weight || this.isDense() ? `color-mix(in srgb, ${css("--blue")} 50%, ${css("--paper")})` : css("--blue")), width: 1.4, gaps: (u) => this.gaps(u), points: { show: (u) => u.scales.x.max - u.scales.x.min < 60, size: 4, fill: () => css("--blue") } },
        { stroke: () => css("--blue"), width: 1.8, spanGaps: true, points: { show: false } }],
        hooks: {
          drawClear: [(u) => this.drawBelow(u, name)],
          draw: [(u) => this.drawAbove(u, name)],
          setCursor: [(u) => this.point(u)],
          setScale: [(u, key) => { if (key === "x" && !this.setting) this.zoom(u.scales.x.min, u.scales.x.max); }],
        },
      };
    }

    // The line spans a step that was not applied, and starts again after a rollback.
    gaps(u) {
      const found = [];
      for (const mark of this.rollbacks()) {
        let before = place(this.attempt, mark.attempt), after = before + 1;
        while (before > 0 && !this.isApplied(before)) before--;
        while (after < this.attempt.length - 1 && !this.isApplied(after)) after++;
        if (after >= this.attempt.length) continue;
        const at = (row) => Math.round(u.valToPos(this.attempt[row], "x", true));
        found.push([at(before), at(after)]);
      }
      return found.sort((a, b) => a[0] - b[0]);
    }

    height(u, name, isLog) {
      const min = u.scales.x.min ?? 0, max = u.scales.x.max ?? Infinity;
      const to = place(this.attempt, max);
      // The steep beginning would flatten the rest.
      const begin = name === "loss" && !isLog && this.whole ? min + 0.1 * (Math.min(max, this.attempt[to]) - min) : min;
      const from = Math.max(0, place(this.attempt, begin)), seen = [];
      for (let at = from; at <= to; at++) if (this.isApplied(at)) seen.push(this.columns[name][at]);
      if (name === "loss") {
        for (const [attempt, , value] of this.evaluations) if (attempt >= min && attempt <= max) seen.push(value);
      }
      return bounds(seen, isLog) ?? bounds(this.columns[name], isLog) ?? [0.1, 1];
    }

    // Behind the curve: the gate's limits, undone stretches, restarts.
    drawBelow(u, name) {
      within(u, 0, false, (pen) => {
        const { top, height } = u.bbox, ratio = devicePixelRatio;
        pen.fillStyle = css("--undone");
        for (const mark of this.rollbacks()) {
          const from = u.valToPos(mark.back, "x", true), to = u.valToPos(mark.attempt, "x", true);
          pen.fillRect(from, top, Math.max(1, to - from), height);
        }
        const limit = this.columns[LIMITS[name]];
        if (limit) this.drawLimit(u, limit);
        for (const mark of this.marks) {
          if (mark.kind === "rollback" || mark.kind === "redo") continue;
          const x = Math.round(u.valToPos(mark.attempt, "x", true)) - ratio / 2;
          pen.strokeStyle = css({ rebaseline: "--green", halt: "--red" }[mark.kind] ?? "--ink-2");
          pen.lineWidth = (mark.kind === "halt" ? 3 : 1.5) * ratio;
          pen.setLineDash(({ halt: [], rebaseline: [2, 3] }[mark.kind] ?? [5, 4]).map((one) => one * ratio));
          trace(pen, [x, top], [x, top + height]);
          pen.stroke();
        }
      });
    }

    rollbacks() {
      return this.marks.filter((mark) => mark.kind === "rollback" && mark.back !== null);
    }

    drawLimit(u, limit) {
      const pen = u.ctx, { left, top, width, height } = u.bbox;
      const edge = new Path2D(), area = new Path2D();
      let open = null, last = 0;
      const close = () => {
        if (open !== null) { area.lineTo(last, top); area.lineTo(open, top); area.closePath(); }
        open = null;
      };
      for (let at = 0; at < limit.length; at++) {
        if (limit[at] === null) { close(); continue; }
        const x = u.valToPos(this.attempt[at], "x", true);
        if (x < left - width || x > left + 2 * width) continue;
        const y = Math.min(top + height, Math.max(top - 4, u.valToPos(limit[at], "y", true)));
        if (open === null) { open = x; edge.moveTo(x, y); area.moveTo(x, y); } else { edge.lineTo(x, y); area.lineTo(x, y); }
        last = x;
      }
      close();
      pen.fillStyle = css("--limit");
      pen.fill(area);
      pen.strokeStyle = css("--limit-edge");
      pen.lineWidth = devicePixelRatio;
      pen.stroke(edge);
    }

    // In front of it: steps not applied, values off the scale, rollbacks, held-out losses.
    drawAbove(u, name) {
      within(u, 6 * devicePixelRatio, true, () => {
        if (name === "loss") { this.drawEvaluations(u); this.drawRing(u); }
        if (LIMITS[name]) this.drawOdd(u, name);
        this.drawHigh(u, name);
        if (name === "loss") this.drawArcs(u);
      });
      if (name === "loss") this.pin(u);
    }

    // A numbered button at each incident; those that would lie on one another are one.
    pin(u) {
      const pins = [];
      for (const [number, from, to, words] of this.incidents) {
        const at = u.valToPos(from, "x");
        if (at < 0 || at > u.over.clientWidth) continue;
        const before = pins[pins.length - 1];
        if (before && at - before.at < 26) { before.last = number; before.words += `\n${number}: ${words}`; before.to = to; }
        else pins.push({ at, first: number, last: number, words: `${number}: ${words}`, from, to });
      }
      for (const old of u.over.querySelectorAll(".pin")) old.remove();
      for (const one of pins) {
        const pin = document.createElement("button");
        pin.type = "button";
        pin.className = "pin";
        pin.style.left = `${one.at}px`;
        pin.textContent = one.first === one.last ? one.first : `${one.first}-${one.last}`;
        pin.title = one.words.slice(0, 2000);
        pin.addEventListener("mousedown", (event) => event.stopPropagation());
        pin.addEventListener("click", () => {
          if (one.first === one.last) openIncident(this.section, one.first);
          else this.show(one.from, one.to);
        });
        u.over.append(pin);
      }
    }

    // Zooms to attempts, and puts the cursor there.
    show(from, to) {
      const room = Math.max(20, 2 * (to - from));
      this.zoom(from - room, to + room);
      const [chart] = this.charts;
      // uPlot applies a scale in a microtask.
      setTimeout(() => chart.setCursor({ left: chart.valToPos(from, "x"), top: 10 }));
    }

    inside(u, x) {
      return x >= u.bbox.left - 1 && x <= u.bbox.left + u.bbox.width + 1;
    }

    // Signs that would lie on one another are one: a cross if one of the steps was not applied.
    drawOdd(u, name) {
      const pen = u.ctx, { top, height } = u.bbox, ratio = devicePixelRatio, arm = 4.5 * ratio, signs = [];
      for (const [at, [action]] of this.odd) {
        if (action === "apply") continue;
        const x = u.valToPos(this.attempt[at], "x", true), value = this.columns[name][at];
        if (!this.inside(u, x)) continue;
        const y = value === null ? top + arm : Math.max(top + arm, Math.min(top + height - arm, u.valToPos(value, "y", true)));
        pen.strokeStyle = css(action === "redo" ? "--green" : "--red");
        pen.lineWidth = ratio;
        pen.globalAlpha = 0.45;
        trace(pen, [x, top + height], [x, y]);
        pen.stroke();
        pen.globalAlpha = 1;
        const before = signs[signs.length - 1];
        if (before && x - before.x < 2.5 * arm) before.isRedo &&= action === "redo";
        else signs.push({ x, y, isRedo: action === "redo" });
      }
      pen.lineWidth = 2 * ratio;
      for (const { x, y, isRedo } of signs) {
        pen.strokeStyle = css(isRedo ? "--green" : "--red");
        if (isRedo) { // a circular arrow
          pen.beginPath();
          pen.arc(x, y, arm, 0.9, 2 * Math.PI - 0.3);
          pen.stroke();
          trace(pen, [x + arm + 1.5 * ratio, y - arm], [x + arm, y - 0.5 * ratio], [x + 0.5 * ratio, y - 2 * ratio]);
        } else {
          trace(pen, [x - arm, y - arm], [x + arm, y + arm]);
          pen.stroke();
          trace(pen, [x - arm, y + arm], [x + arm, y - arm]);
        }
        pen.stroke();
      }
    }

    // An applied value above the scale: an arrowhead at the edge, and the line goes up to it.
    drawHigh(u, name) {
      const pen = u.ctx, { top } = u.bbox, ratio = devicePixelRatio, high = u.scales.y.max;
      pen.fillStyle = css("--blue");
      let before = -Infinity;
      for (let at = 0; at < this.attempt.length; at++) {
        const value = this.columns[name][at];
        if (value === null || value <= high || !this.isApplied(at)) continue;
        const x = u.valToPos(this.attempt[at], "x", true);
        const isNear = x - before < 9 * ratio;
        if (isNear || !this.inside(u, x)) { before = isNear ? x : before; continue; } // one for a stretch
        before = x;
        triangle(pen, x, top - 7 * ratio, 5 * ratio, 9 * ratio);
      }
    }

    drawArcs(u) {
      const pen = u.ctx, { left, width, top } = u.bbox, ratio = devicePixelRatio;
      pen.strokeStyle = css("--purple");
      pen.lineWidth = 2 * ratio;
      let before = -Infinity;
      for (const mark of this.rollbacks()) {
        const from = u.valToPos(mark.attempt, "x", true), to = u.valToPos(mark.back, "x", true);
        if (from < left || to > left + width || from - before < 11 * ratio) continue;
        before = from;
        const y = top - 1 * ratio, up = Math.min(22 * ratio, 8 * ratio + (from - to) / 6);
        pen.beginPath();
        pen.moveTo(from, y);
        pen.quadraticCurveTo((from + to) / 2, y - 2 * up, to, y);
        pen.stroke();
        const angle = Math.atan2(2 * up, (to - from) / 2), arm = 8 * ratio;
        const end = (turn) => [to - arm * Math.cos(angle + turn), y - arm * Math.sin(angle + turn)];
        trace(pen, end(-0.5), [to, y], end(0.5));
        pen.stroke();
      }
    }

    drawEvaluations(u) {
      const pen = u.ctx, ratio = devicePixelRatio;
      pen.strokeStyle = css("--orange");
      pen.fillStyle = css("--paper");
      pen.lineWidth = 1.6 * ratio;
      const points = this.evaluations.map(([attempt, , value]) => [u.valToPos(attempt, "x", true), u.valToPos(value, "y", true)]);
      within(u, 0, false, () => { trace(pen, ...points); pen.stroke(); });
      let before = -Infinity;
      for (const [x, y] of points) {
        if (!this.inside(u, x) || x - before < 10 * ratio || y < u.bbox.top || y > u.bbox.top + u.bbox.height) continue;
        before = x;
        pen.beginPath(); pen.arc(x, y, 3.6 * ratio, 0, 7); pen.fill(); pen.stroke();
      }
    }

    drawRing(u) {
      const pen = u.ctx, ratio = devicePixelRatio, base = u.bbox.top + u.bbox.height;
      for (const one of this.ring) {
        if (one.state === "tainted") continue;
        const x = u.valToPos(one.attempt, "x", true);
        if (!this.inside(u, x)) continue;
        pen.fillStyle = css(one.state === "clean" ? "--green" : "--ink-2");
        triangle(pen, x, base - 9 * ratio, 5 * ratio, 9 * ratio);
      }
    }

    point(u) {
      const at = u.cursor.idx;
      if (at === null || at === undefined || u.cursor.left < 0) return;
      const words = [`step ${group.format(this.step[at])}`];
      for (const name of Object.keys(TITLES)) {
        const value = this.columns[name][at];
        const told = name === "lr" && value === null && !this.isApplied(at) ? "" : value;
        if (told !== "" && (value !== null || name === "loss" || name === "grad_norm")) {
          words.push(`${this.titles[name]} ${value === null ? "not finite" : short(value)}`);
        }
      }
      const limit = this.columns.loss_limit[at];
      if (limit !== null) words.push(`limit ${short(limit)}`);
      const near = this.evaluations.filter(([attempt]) => attempt <= this.attempt[at]).pop();
      if (near) words.push(`held-out ${short(near[2])} (step ${group.format(near[1])})`);
      const odd = this.odd.get(at);
      if (odd) words.push(odd[0] === "apply" ? odd[1] : `${odd[0]}: ${odd[1]}`);
      for (const mark of this.marks) {
        if (mark.attempt === this.attempt[at]) words.push(mark.kind === "start" ? "restart" : `${mark.kind}: ${mark.words}`);
      }
      words.push(`attempt ${group.format(this.attempt[at] + 1)}`);
      this.readout.textContent = words.join(" \u00b7 ");
    }

    key(key, chart) {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
      if (key in moves) {
        const { min, max } = chart.scales.x;
        const first = place(this.attempt, min) + (this.attempt[place(this.attempt, min)] < min ? 1 : 0);
        const now = chart.cursor.left >= 0 && chart.cursor.idx !== null ? chart.cursor.idx : first;
        const at = Math.max(first, Math.min(place(this.attempt, max), now + moves[key]));
        chart.setCursor({ left: chart.valToPos(this.attempt[at], "x"), top: 10 });
      } else if (key === "+" || key === "=") this.scale(0.5);
      else if (key === "-") this.scale(2);
      else if (key === "0" || key === "Escape") this.zoomOut();
      else return false;
      return true;
    }

    redraw() {
      for (const chart of this.charts) chart.redraw(false, true);
    }

    refresh() {
      const names = this.charts.map((chart) => chart.root.parentElement.dataset.curve);
      const { min, max } = this.charts[0].scales.x;
      this.setting = true;
      this.charts.forEach((chart, at) => {
        const [first, last] = this.range();
        chart.setData(this.series(names[at]), false);
        chart.setScale("x", this.whole ? { min: first, max: last } : { min, max });
      });
      this.setting = false;
    }
  }

  // Round numbers in the scale: powers of ten, else more of each, else as on a linear one.
  function logSplits(u, axis, min, max) {
    for (const digits of [[1], [1, 2, 5]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++) {
        found.push(...digits.map((one) => one * 10 ** power).filter((v) => v >= min && v <= max));
      }
      if (found.length > 1) return found.filter((_, at) => at % Math.ceil(found.length / 7) === 0);
    }
    const rough = (max - min) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough), first = Math.ceil(min / step);
    return Array.from({ length: Math.floor(max / step) - first + 1 }, (_, at) => (first + at) * step);
  }

  // -- several runs --------------------------------------------------------------------------

  const METRICS = { "loss": 2, "held-out loss": 2, "gradient norm": 3, "tokens (or samples) per second": 4 };

  // The value at a place between points; null beyond them.
  function between(points, x) {
    const at = place(points.map((one) => one[0]), x), [one, other] = [points[at], points[at + 1] ?? points[at]];
    if (!one || x < points[0][0] || x > points[points.length - 1][0]) return null;
    return other[0] === one[0] ? one[1] : one[1] + ((x - one[0]) / (other[0] - one[0])) * (other[1] - one[1]);
  }

  class Compared {
    constructor(told, figure) {
      this.told = told;
      this.figure = figure;
      this.readout = document.createElement("p");
      this.readout.className = "readout";
      this.readout.setAttribute("aria-live", "polite");
      this.readout.textContent = "Point at the chart to read its numbers.";
      const box = document.createElement("div");
      box.className = "controls";
      figure.before(this.readout, box);
      this.metric = input(box, "curve", {}, Object.keys(METRICS));
      this.along = input(box, "over", {}, ["steps", "samples", "hours"]);
      this.smooth = input(box, "smoothing", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.6 });
      this.differs = input(box, `difference to ${told.names[0]}`, { type: "checkbox" });
      for (const one of [this.metric, this.along, this.smooth, this.differs]) one.addEventListener("input", () => this.draw());
      this.draw();
    }

    // Each run's points of what is chosen, rising along the axis.
    lines() {
      const { told } = this, metric = this.metric.value, along = this.along.value;
      const rows = metric === "held-out loss" ? told.evaluations : told.lines;
      const lines = rows.map((line, run) => {
        const x = (row) => (along === "hours" ? row[1] : along === "samples" ? row[0] * (told.batch[run] ?? 1) : row[0]);
        const points = line.map((row) => [x(row), row[METRICS[metric]]]).filter((one) => one[0] !== null && one[1] !== null);
        points.sort((one, other) => one[0] - other[0]);
        return average(points.filter((one, at) => !at || one[0] > points[at - 1][0]), Number(this.smooth.value));
      });
      if (!this.differs.checked) return lines;
      return lines.map((line) => line.map(([at, value]) => [at, between(lines[0], at), value]).filter((one) => one[1] !== null).map(([at, first, value]) => [at, value - first]));
    }

    draw() {
      const styles = [["--blue"], ["--orange", [7, 3]], ["--green", [2, 3]], ["--purple", [10, 3, 2, 3]], ["--red"], ["--sky", [7, 3]], ["--ink", [2, 3]], ["--ink-2", [10, 3, 2, 3]]];
      const { told, figure } = this, lines = this.lines(), along = this.along.value;
      figure.chart?.destroy();
      figure.querySelector("figcaption").textContent = `${this.metric.value[0].toUpperCase()}${this.metric.value.slice(1)}, over ${along}`;
      this.chart = draw(figure, {
        height: 280, padding: [10, 30, 0, 0],
        cursor: { drag: { x: true, y: false }, y: false },
        scales: { x: { time: false }, y: { range: (u) => {
          const min = u.scales.x.min ?? -Infinity, max = u.scales.x.max ?? Infinity;
          const seen = lines.flatMap((line) => line.filter((p) => !(p[0] < min || p[0] > max)).map((p) => p[1]));
          return bounds(seen, false) ?? [0, 1];
        } } },
        axes: [
          axis(32, { space: 70, values: (u, s) => s.map((v) => group.format(v)) }),
          axis(72, { values: (u, s) => s.map(short) }),
        ],
        series: [{}, ...lines.map((_, at) => {
          const [colour, dash] = styles[at % styles.length];
          return { label: told.names[at], stroke: () => css(colour), dash, width: 1.6, spanGaps: true, points: { show: false } };
        })],
        hooks: { setCursor: [(u) => {
          if (u.cursor.left < 0) return;
          const at = u.posToVal(u.cursor.left, "x");
          const words = lines.map((line, run) => `${told.names[run]} ${short(between(line, at))}`);
          this.readout.textContent = [`${along.slice(0, -1)} ${group.format(along === "hours" ? at : Math.max(0, Math.round(at)))}`, ...words].join(" \u00b7 ");
        }] },
      }, uPlot.join(lines.map((line) => [line.map((p) => p[0]), line.map((p) => p[1])])));
      zoomable(this.chart, (factor, share) => this.chart.setScale("x", scaled(this.chart.scales.x, factor, share)));
    }

    redraw() {
      this.chart.redraw(false, true);
    }
  }

  // -- colours over time ---------------------------------------------------------------------

  class HeatView {
    constructor(figure) {
      const told = JSON.parse(figure.dataset.heat);
      this.told = told;
      this.cells = Uint8Array.from(atob(told.cells), (one) => one.charCodeAt(0));
      this.image = figure.querySelector(".cells");
      this.row = this.column = -1;
      this.line = document.createElement("p");
      this.line.className = "told";
      this.line.setAttribute("aria-live", "polite");
      this.line.textContent = document.querySelector(".told") ? "" : "Point at a cell to read it.";
      figure.querySelector(".framed").before(this.line);
      this.here = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      this.here.setAttribute("class", "here");
      for (const name of ["pointermove", "pointerdown"]) figure.querySelector(".plane").addEventListener(name, (event) => this.point(event));
      withKeys(figure, figure.querySelector("figcaption").textContent, (key) => this.key(key));
    }

    point(event) {
      const box = this.image.getBoundingClientRect();
      const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
      if (across < 0 || across >= 1 || down < 0 || down >= 1) return;
      this.show(Math.floor(down * this.told.names.length), Math.floor(across * this.told.steps.length));
    }

    key(key) {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
      if (!move) return false;
      this.show(Math.max(0, this.row) + (this.row < 0 ? 0 : move[0]), Math.max(0, this.column) + (this.column < 0 ? 0 : move[1]));
      return true;
    }

    show(row, column) {
      const { names, steps, width: looks } = this.told;
      this.row = Math.max(0, Math.min(names.length - 1, row));
      this.column = Math.max(0, Math.min(steps.length - 1, column));
      const when = `${looks > 1 ? "from step" : "step"} ${group.format(steps[this.column])}`;
      this.line.textContent = [names[this.row], when, this.value(this.cells[this.row * steps.length + this.column])].join(" \u00b7 ");
      const height = Number(this.image.getAttribute("height")) / names.length;
      this.here.setAttribute("x", `${(100 * this.column) / steps.length}%`);
      this.here.setAttribute("y", this.row * height);
      this.here.setAttribute("width", `${Math.max(0.4, 100 / steps.length)}%`);
      this.here.setAttribute("height", Math.max(3, height));
      if (!this.here.parentNode) this.image.parentNode.append(this.here);
    }

    value(place) {
      const { low, high, log } = this.told;
      if (place === 0) return "not finite, or not measured";
      if (place === 255) return `far above ${short(high)}`;
      const share = (place - 1) / 253;
      const value = log ? low * (high / low) ** share : low + share * (high - low);
      const ends = place === 1 ? "at most " : place === 254 ? "at least " : "about ";
      return ends + short(Number(value.toPrecision(2)));
    }
  }

  // -- all together --------------------------------------------------------------------------

  function listen(scope) {
    for (const figure of scope.querySelectorAll("figure.heat")) new HeatView(figure);
    for (const button of scope.querySelectorAll("button.zoom")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const article = button.closest("article");
        const section = article.querySelector("section.curves");
        const view = views.find((one) => one.section === section);
        if (!view) return;
        view.show(Number(button.dataset.from), Number(button.dataset.to));
        section.scrollIntoView({ block: "start" });
        section.querySelector("figure.chart").focus({ preventScroll: true });
      });
    }
    for (const button of scope.querySelectorAll("button.copy")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const code = button.parentElement.querySelector("code");
        getSelection().selectAllChildren(code);
        const copied = navigator.clipboard ? navigator.clipboard.writeText(code.textContent).then(() => true, () => document.execCommand("copy")) : Promise.resolve(document.execCommand("copy"));
        copied.then((done) => { button.textContent = done ? "copied" : "selected: press Ctrl-C"; });
      });
    }
    for (const box of scope.querySelectorAll(".filter")) {
      box.hidden = false;
      box.querySelector("select").addEventListener("change", (event) => {
        const kind = event.target.value, section = box.closest("section");
        for (const one of section.querySelectorAll(".incident")) one.hidden = kind !== "" && !one.dataset.kinds.split(" ").includes(kind);
        for (const one of section.querySelectorAll(".older")) one.open = kind !== "";
      });
    }
  }

  // -- addresses -----------------------------------------------------------------------------

  // #incident=6 opens it and zooms to it; #step=84 zooms to the last attempt at the step.
  function openIncident(section, number) {
    const run = Number(section ? section.dataset.run : 0);
    const card = document.getElementById(`incident-${number}${run ? `-${run}` : ""}`);
    if (!card) return;
    for (let one = card.querySelector("details"); one; one = one.parentElement.closest("details")) one.open = true;
    card.scrollIntoView({ block: "center" });
    if (run === 0) history.replaceState(null, "", `#incident=${number}`);
  }

  function go() {
    const [, what, text] = /^#(incident|step)[=-](\d+)$/.exec(location.hash) ?? [];
    const view = views.find((one) => one.section), number = Number(text);
    if (what === "incident") {
      const found = view?.incidents.find(([one]) => one === number);
      if (found) view.show(found[1], found[2]);
      openIncident(view?.section, number);
    } else if (what === "step" && view) {
      const at = view.attempt[view.step.findLastIndex((one) => one <= number)] ?? 0;
      view.show(at, at);
      view.section.scrollIntoView({ block: "start" });
    }
  }

  for (const section of document.querySelectorAll("section.curves")) {
    views.push(new RunView(section, data.runs[Number(section.dataset.run)]));
  }
  const compared = document.querySelector("figure.compare");
  if (data.compare && compared) views.push(new Compared(data.compare, compared));
  listen(document);
  addEventListener("hashchange", go);
  setTimeout(go); // the charts have their height after a microtask
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.forEach((one) => one.redraw()));

  // -- live ----------------------------------------------------------------------------------

  const MOST_ROWS = 40000;
  let tooLong = false; // then all is asked for again, as few columns

  // Updates the legend and the static drawings; the charts stay.
  function renew(section, markup) {
    const fresh = document.createElement("template");
    fresh.innerHTML = markup;
    for (const what of [".legend", ...Object.keys(TITLES).map((name) => `svg.still.${name}`)]) {
      const old = section.querySelector(what), made = fresh.content.querySelector(what);
      if (old && made) old.replaceWith(made);
    }
  }

  // Shows what an event tells; returns what the run is.
  function take(told) {
    let view = views.find((one) => one.section);
    for (const [name, markup] of Object.entries(told.parts)) {
      const part = document.querySelector(`[data-part="${name}"]`);
      if (!part) continue;
      if (name === "curves" && view) {
        renew(view.section, markup);
        continue;
      }
      // What was open stays so, by its words: their counts grow.
      const nameOf = (one) => one.closest("[id]").id + (one.querySelector("summary > .line") ? "" : one.firstChild.textContent.replace(/[\d,]+/g, ""));
      const open = new Set([...part.querySelectorAll("details[open]")].map(nameOf)), kind = part.querySelector(".filter select")?.value;
      part.innerHTML = markup; // made and escaped by runner.tools.report.markup
      for (const one of part.querySelectorAll("details")) one.open = open.has(nameOf(one));
      listen(part);
      const filter = kind && part.querySelector(".filter select");
      if (filter) { filter.value = kind; filter.dispatchEvent(new Event("change")); }
      const link = document.querySelector(`.contents a[data-of="${name}"]`);
      if (link) link.hidden = markup === "";
    }
    if (told.run) {
      const section = document.querySelector("section.curves");
      if (!view && section) {
        view = new RunView(section, told.run);
        views.push(view);
      } else if (view) {
        if (told.whole) view.take(told.run); else view.append(told.run);
        view.refresh();
      }
    }
    document.title = told.title;
    tooLong = !told.whole && view?.attempt.length > MOST_ROWS;
    return told.alive ? "live" : "live page of a run that is not in progress";
  }

  // -- age -----------------------------------------------------------------------------------

  const age = (seconds) => {
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= 2 * size) return `${Math.floor(seconds / size)} ${unit}`;
    }
    return `${Math.floor(seconds)} s`;
  };

  // The state of a run that had not ended turns red, with the reason before it; once.
  function doubt(words) {
    for (const box of document.querySelectorAll(".state.running, .state.plain, .state.silent")) {
      let told = box.querySelector(".doubt");
      if (!told) {
        told = document.createElement("strong");
        told.className = "doubt";
        box.prepend(told);
      }
      box.classList.add("stale");
      box.querySelector(".status").textContent = "\u26a0 unknown";
      told.textContent = `${words} `;
    }
  }

  const LATE_SECONDS = 15;
  if (data.live) {
    const line = document.querySelector(".live");
    line.hidden = false;
    let words = "live", trouble = "", answered = Date.now(), version = data.version, isDoubtful = false, source = null;
    // A hidden page has no connection: browsers have six for a server, and the server 32 in all.
    const open = () => {
      source?.close();
      if (document.hidden) return;
      answered = Date.now();
      source = new EventSource(`events?after=${encodeURIComponent(version)}`);
      source.onmessage = (event) => {
        const told = JSON.parse(event.data);
        answered = Date.now() - 1000 * (told.age ?? 0);
        trouble = told.trouble ?? "";
        if (!told.parts) return;
        version = event.lastEventId;
        words = take(told);
        if (tooLong) { version = ""; open(); }
      };
    };
    document.addEventListener("visibilitychange", open);
    open();
    setInterval(() => {
      const seconds = (Date.now() - answered) / 1000;
      const isLate = seconds > LATE_SECONDS && !document.hidden;
      const why = trouble || "the server of this page does not answer";
      line.textContent = isLate ? why : `${words}, ${age(seconds)} ago`;
      if (isLate) doubt(`Not known for ${age(seconds)}: ${why}.`);
      else if (isDoubtful) { version = ""; open(); } // the parts that turned red are made anew
      isDoubtful = isLate;
      if (source?.readyState === EventSource.CLOSED) { const before = answered; open(); answered = before; }
    }, 1000);
  } else {
    const look = () => {
      const seconds = Date.now() / 1000 - data.made;
      if (seconds > data.stale) doubt(`This page is ${age(seconds)} old; the run may have ended since.`);
    };
    look();
    setInterval(look, 10000);
  }
})();
