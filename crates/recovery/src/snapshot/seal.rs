//! Seal: the last line of a text is the checksum of the lines before, `blake3 HEX`.

const SEAL: &str = "blake3 ";

/// Adds the seal to a text.
pub fn close(body: String) -> String {
    let body = body + "\n";
    let seal = blake3::hash(body.as_bytes()).to_hex();
    format!("{body}{SEAL}{seal}\n")
}

/// The text without its seal, or what is wrong with it.
pub fn open(text: &str) -> Result<&str, &'static str> {
    let (body, seal) = text.rsplit_once(SEAL).ok_or("it ends without a checksum")?;
    match seal.strip_suffix('\n') == Some(blake3::hash(body.as_bytes()).to_hex().as_str()) {
        true => Ok(body),
        false => Err("its checksum is wrong"),
    }
}
