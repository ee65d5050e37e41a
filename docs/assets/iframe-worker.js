/* Browsers start no worker for a page that is opened from disk. The search's worker needs two functions only,
   addEventListener and postMessage, and a hidden frame has both. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      script.src = url;
      this.send = new Promise((ready) => {
        script.onload = () => ready((data) => inner.dispatchEvent(new MessageEvent("message", { data })));
      });
      inner.document.body.append(script);
    }
    postMessage(data) {
      this.send.then((send) => send(data));
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
