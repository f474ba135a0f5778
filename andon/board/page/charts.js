// Curves with uPlot: joined series over steps, one cursor for all charts, a spoken readout, arrow keys.
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function shown(value, digits = 4) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return compact.format(value);
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(digits));
}
export const count = value => value == null ? "–" : Math.round(value).toLocaleString("en");

// A moving average over a window that grows with the curve, to show the trend in the noise.
export function smooth(values) {
  const reach = Math.floor(values.length / 60);
  if (reach < 1) return values;
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value == null ? 0 : 1));
  });
  return values.map((_, i) => {
    const near = Math.min(reach, i, values.length - 1 - i), a = i - near, b = i + near + 1;
    return counts[b] > counts[a] ? (sums[b] - sums[a]) / (counts[b] - counts[a]) : null;
  });
}

// A line is {label, x, y, color, width, dash, points, alpha, low, high, quiet}.
export class Chart {
  constructor(element, { onZoom, onCursor, onSpeak, format = shown, small = false }) {
    Object.assign(this, { element, onZoom, onCursor, onSpeak, format, small, log: false, range: null, lines: [], rule: null, index: null });
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(element);
    element.addEventListener("keydown", event => this.key(event));
  }
  size() { return { width: Math.max(120, this.element.clientWidth), height: this.element.clientHeight || 150 }; }

  show(lines, { rule = null, range = null, log = false } = {}) {
    const shape = JSON.stringify([lines.map(each => [each.label, each.color, !!each.low, each.alpha]), log, document.documentElement.dataset.theme, matchMedia("(prefers-color-scheme: dark)").matches]);
    Object.assign(this, { lines, rule, range, log });
    const tables = lines.map(each => each.low ? [each.x, each.y, each.low, each.high] : [each.x, each.y]);
    const data = tables.length ? uPlot.join(tables) : [[]];
    if (shape !== this.shape) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), data, this.element);
    } else this.plot.setData(data);
    this.element.dataset.points = data[0].length;
  }

  options() {
    const series = [{}], bands = [];
    for (const line of this.lines) {
      const stroke = css(line.color) || line.color;
      series.push({ label: line.label, stroke: line.alpha ? stroke + line.alpha : stroke, width: line.width ?? 1.6, dash: line.dash, spanGaps: true,
        points: { show: !!line.points, size: 6, fill: css("--card"), stroke, width: 1.8 } });
      if (line.low) {
        const at = series.length;
        series.push({ stroke: "transparent", spanGaps: true, points: { show: false } }, { stroke: "transparent", spanGaps: true, points: { show: false } });
        bands.push({ series: [at + 1, at], fill: stroke + "2e" });
      }
    }
    const axis = { stroke: css("--soft"), font: "12px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: css("--line"), width: 1 } };
    return {
      ...this.size(), series, bands, legend: { show: false }, padding: [8, 16, 0, 0],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, y: false },
      scales: { x: { time: false, range: (_, low, high) => this.range ?? (low === high ? [low - 1, high + 1] : [low, high]) }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.log ? this.logBounds(low, high) : this.bounds(low, high) } },
      axes: [{ ...axis, size: 26, values: (_, ticks) => ticks.map(tick => Number.isInteger(tick) ? shown(tick, 6) : "") }, { ...axis, size: this.small ? 54 : 46, space: this.small ? 34 : 44, values: (_, ticks) => ticks.map(tick => tick == null || (this.log && !/^[125]e/.test(tick.toExponential())) ? "" : shown(tick, 3)) }],
      hooks: {
        setSelect: [plot => { if (plot.select.width > 4) { this.onZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]); plot.setSelect({ width: 0, height: 0 }, false); } }],
        setCursor: [plot => { this.index = plot.cursor.idx; this.onCursor?.(this.readout()); }],
        draw: [plot => this.rule != null && this.drawRule(plot)],
        ready: [plot => plot.over.addEventListener("dblclick", () => this.onZoom(null))],
      },
    };
  }
  bounds(low, high) {
    if (low == null) return [0, 1];
    if (this.rule != null) low = Math.min(low, this.rule);
    const room = (high - low || Math.abs(high) || 1) * 0.07;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }
  logBounds(low, high) {
    if (!(low > 0)) return [0.1, 10];
    return [0.93 * (this.rule > 0 ? Math.min(low, this.rule) : low), 1.07 * high];
  }
  drawRule(plot) {
    const y = plot.valToPos(this.rule, "y", true), { left, width, top, height } = plot.bbox;
    if (y < top || y > top + height) return;
    const context = plot.ctx;
    context.save();
    context.strokeStyle = css("--soft"); context.lineWidth = devicePixelRatio; context.setLineDash([5, 5]);
    context.beginPath(); context.moveTo(left, y); context.lineTo(left + width, y); context.stroke();
    context.restore();
  }
  // The step at the cursor, and the value of each line there: its last one up to that step.
  readout() {
    const at = this.index;
    if (at == null || !this.plot) return null;
    const x = this.plot.data[0][at];
    return { step: x, values: this.lines.filter(line => !line.quiet).map(line => {
      let i = line.x.length - 1;
      while (i > 0 && line.x[i] > x) i--;
      return [line, line.x[0] <= x ? line.y[i] : null];
    }) };
  }
  key(event) {
    const steps = this.plot?.data[0] ?? [], last = steps.length - 1, by = event.shiftKey ? 20 : 1;
    const inside = i => !this.range || (steps[i] >= this.range[0] && steps[i] <= this.range[1]);
    const moves = { ArrowLeft: -by, ArrowRight: by, Home: -last, End: last };
    if (event.key in moves && last >= 0) {
      event.preventDefault();
      let next = Math.min(last, Math.max(0, (this.index ?? last) + moves[event.key]));
      while (!inside(next) && next !== this.index) next += Math.sign((this.index ?? 0) - next) || 1;
      this.plot.setCursor({ left: this.plot.valToPos(steps[next], "x"), top: 10 });
      const found = this.readout();
      this.onSpeak?.(`step ${count(found.step)}: ${found.values.map(([line, value]) => `${line.label} ${this.format(value)}`).join(", ")}`);
    } else if ((event.key === "+" || event.key === "-") && last > 0) {
      const [a, b] = this.range ?? [steps[0], steps[last]], middle = steps[this.index ?? last >> 1], half = (b - a) * (event.key === "+" ? 0.25 : 1);
      const next = [Math.max(steps[0], middle - half), Math.min(steps[last], middle + half)];
      this.onZoom(event.key === "-" && half * 2 >= b - a && next[0] <= 1 ? null : next);
    }
  }
}
