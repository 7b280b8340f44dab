//! The formats that the Python package's integrations serve besides the container, and the texts of their refusals.
//!
//! The engine knows one resource for other formats and nothing of their names. They are listed here: the bodies that
//! torchft 0.2.0 asks for, and the files of a distributed checkpoint. Which of them a publication has is decided by the
//! callable it was published with.

use tensorferry_core::Frontend;

/// The folder below which the files of torch's distributed checkpoints are served.
const DCP: &str = "dcp";
/// The list of these files, which is asked for with and without the slash.
const DCP_LIST: &str = "dcp/";

/// The transport for torchft, with the bodies torchft 0.2.0 asks for, and the folder of torch's distributed
/// checkpoints. Which of them a publication really has is for the callable it was published with.
#[derive(Debug)]
pub(crate) struct PythonFrontend;

impl Frontend for PythonFrontend {
    /// The name of the body behind `path`: `full`, `metadata` and the index of a chunk are torchft's, the index in
    /// ASCII digits with or without a sign; `dcp/{file}` is a file of a distributed checkpoint, and `dcp` or `dcp/` the
    /// list of its files.
    fn alternate(&self, path: &str) -> Option<String> {
        match path.split_once('/') {
            Some((DCP, file)) if !file.contains('/') => Some(path.to_owned()),
            Some(_) => None,
            None if path == DCP => Some(DCP_LIST.to_owned()),
            None if matches!(path, "full" | "metadata") => Some(path.to_owned()),
            None => path.parse::<i64>().ok().map(|index| index.to_string()),
        }
    }

    fn media_type(&self, name: &str) -> &'static str {
        if name == DCP_LIST { "text/html; charset=utf-8" } else { "application/octet-stream" }
    }

    fn missing(&self, name: &str) -> String {
        match name.split_once('/') {
            Some((_, "")) => "there is no folder here".to_owned(),
            Some((_, file)) => format!("there is no file {file} here"),
            // It begins as Python says it to torchft's own server.
            None => format!(
                "list index out of range: there is no chunk {name}. The transport that serves this step has another \
                 num_chunks than the one that asks: give both the same"
            ),
        }
    }

    fn unpublished(&self, step: i64) -> String {
        format!("step {step} is allowed but no state was sent: call send_checkpoint first")
    }
}
