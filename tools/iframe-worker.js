// Workers for pages that are read from the disk, where browsers allow none: the search of the docs site runs in one. Each
// is a hidden frame of the page, whose scripts see what those of a worker see: postMessage, importScripts, and messages.
// The theme asks for this file by the name of the package that it would otherwise fetch (mkdocs.yml).
(() => {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      };
      inside.importScripts = async (...urls) => {
        for (const one of urls)
          await new Promise((resolve, reject) => {
            const script = inside.document.createElement("script");
            Object.assign(script, { src: one, onload: resolve, onerror: reject });
            inside.document.body.append(script);
          });
      };
      this.started = inside.importScripts(new URL(url, location.href).href);
    }

    async postMessage(data) {
      await this.started;
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = IFrameWorker;
  if (location.protocol === "file:") window.Worker = IFrameWorker;
})();
