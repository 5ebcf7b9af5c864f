"use strict";
// The picture of part 4: the matrix of scores with Q and the output at its left, K and V above it.

const EMPTY = 0, PARTIAL = 1, FULL = 2;
const STORED = { S: "--scores", dP: "--scores", P: "--weights", dS: "--weights" };
const LEFT = new Set(["out", "dq"]), ABOVE = new Set(["dk", "dv"]);

/** What lies where after some steps: the colour of each score tile, which rows and columns of output are written. */
class Stage {
  constructor(rows, columns, kinds) {
    Object.assign(this, { rows, columns, kinds, phase: null });
    this.scores = new Array(rows * columns).fill(null);
    this.seen = new Uint8Array(rows * columns);
    this.left = new Uint8Array(rows);
    this.above = new Uint8Array(columns);
    this.at = null;
  }

  /** Take a step {m, n, phase, loads, stores}; m and n count from 1, 0: a row or column alone. */
  take(step) {
    if (step.phase !== this.phase) {
      this.seen.fill(0);
      this.phase = step.phase;
    }
    const tile = step.m && step.n ? (step.m - 1) * this.columns + step.n - 1 : -1;
    if (tile >= 0) this.seen[tile] = 1;
    for (const [name] of step.stores) {
      if (STORED[name] && tile >= 0) this.scores[tile] = STORED[name];
      if (LEFT.has(name) && step.m) this.left[step.m - 1] = 1;
      if (ABOVE.has(name) && step.n) this.above[step.n - 1] = 1;
    }
    this.at = step;
  }

  draw(canvas, seqlen, tiles) {
    const ratio = Math.min(devicePixelRatio || 1, 2), side = canvas.clientWidth;
    canvas.width = canvas.height = Math.round(side * ratio);
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const margin = Math.max(26, side * 0.09), across = side - margin - 2, unit = across / seqlen;
    const edge = (block, tile) => margin + Math.min(block * tile, seqlen) * unit;
    const box = (m, n) => [edge(n, tiles[1]), edge(m, tiles[0]), edge(n + 1, tiles[1]), edge(m + 1, tiles[0])];
    const colours = { [EMPTY]: css("--empty"), [PARTIAL]: css("--partial"), [FULL]: css("--full") };
    const names = ["--scores", "--weights", "--seen", "--tile", "--out", "--line", "--soft", "--read", "--dim"];
    const paint = Object.fromEntries(names.map((name) => [name, css(name)]));
    for (let m = 0; m < this.rows; m++) {
      for (let n = 0; n < this.columns; n++) {
        const i = m * this.columns + n, [x, y, right, bottom] = box(m, n);
        c.fillStyle = this.scores[i] ? paint[this.scores[i]] : this.seen[i] ? paint["--seen"] : colours[this.kinds[i]];
        c.fillRect(x, y, right - x, bottom - y);
        if (this.kinds[i] === PARTIAL && !this.scores[i]) hatch(c, x, y, right, bottom, paint["--dim"]);
      }
    }
    this.strips(c, margin, edge, tiles, paint);
    c.strokeStyle = paint["--line"];
    c.lineWidth = 1;
    c.beginPath();
    for (let m = 0; m <= this.rows; m++) { c.moveTo(margin, edge(m, tiles[0])); c.lineTo(margin + across, edge(m, tiles[0])); }
    for (let n = 0; n <= this.columns; n++) { c.moveTo(edge(n, tiles[1]), margin); c.lineTo(edge(n, tiles[1]), margin + across); }
    c.stroke();
    if (this.at && this.at.m && this.at.n) {
      const [x, y, right, bottom] = box(this.at.m - 1, this.at.n - 1);
      c.fillStyle = paint["--tile"];
      c.fillRect(x, y, right - x, bottom - y);
      const stored = this.at.stores.map(([name]) => STORED[name]).find(Boolean);
      if (stored) {
        c.fillStyle = paint[stored];
        c.fillRect(x + (right - x) / 4, y + (bottom - y) / 4, (right - x) / 2, (bottom - y) / 2);
      }
    }
  }

  /** Q and the output beside the rows, K and V above the columns; what is being read is blue. */
  strips(c, margin, edge, tiles, paint) {
    const thick = margin * 0.22, near = margin - thick - 3, far = near - thick - 2;
    const reads = this.at ? this.at.loads.map(([name]) => name) : [];
    const sideOf = (names) => reads.some((name) => names.has(name));
    const rowReads = sideOf(new Set(["q", "out", "dout", "dq", "lse", "row_lse", "delta", "l", "m"]));
    const keyReads = sideOf(new Set(["k", "v", "dk", "dv"]));
    c.font = `${Math.max(9, margin * 0.25)}px system-ui, sans-serif`;
    for (let m = 0; m < this.rows; m++) {
      const y = edge(m, tiles[0]), height = edge(m + 1, tiles[0]) - y - 1;
      const here = this.at?.m === m + 1;
      c.fillStyle = here && rowReads ? paint["--read"] : here ? paint["--tile"] : paint["--soft"];
      c.fillRect(near, y, thick, height);
      c.fillStyle = this.left[m] ? paint["--out"] : paint["--soft"];
      c.fillRect(far, y, thick, height);
    }
    for (let n = 0; n < this.columns; n++) {
      const x = edge(n, tiles[1]), width = edge(n + 1, tiles[1]) - x - 1;
      const here = this.at?.n === n + 1;
      c.fillStyle = here && keyReads ? paint["--read"] : here ? paint["--tile"] : paint["--soft"];
      c.fillRect(x, near, width, thick);
      c.fillStyle = this.above[n] ? paint["--out"] : paint["--soft"];
      c.fillRect(x, far, width, thick);
    }
    c.fillStyle = paint["--dim"];
    c.fillText("K V →", margin, Math.max(8, far - 3));
    c.save();
    c.translate(Math.max(8, far - 3), margin + 26);
    c.rotate(-Math.PI / 2);
    c.fillText("← Q", -4, 0);
    c.restore();
  }
}

/** Diagonal lines over a tile in which only some pairs are visible. */
function hatch(c, x, y, right, bottom, colour) {
  const height = bottom - y, gap = Math.max(4, (right - x) / 4);
  c.save();
  c.beginPath();
  c.rect(x, y, right - x, height);
  c.clip();
  c.strokeStyle = colour;
  c.globalAlpha = 0.35;
  c.beginPath();
  for (let d = -height; d < right - x; d += gap) { c.moveTo(x + d, bottom); c.lineTo(x + d + height, y); }
  c.stroke();
  c.restore();
}
