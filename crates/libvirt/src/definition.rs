//! Definition: the XML of a domain, as `virsh dumpxml --inactive` shows it, and what Hearth changes in it.
//!
//! attach: each disk that Hearth can serve becomes a `vhostuser` disk at the same address, memory becomes a memfd that is shared,
//! and QEMU reports a guest's panic and where its kernel describes itself. detach: the same pieces as they were, in whatever
//! the definition is by then.
//!
//! Source: <https://libvirt.org/formatdomain.html>.

use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

use crate::edit::{Edits, escaped};
use crate::known::unknown;

/// Most queues of a disk that Hearth serves.
pub const QUEUES_MAX: u16 = 16;
/// Bytes of the serial number that virtio-blk has.
const SERIAL_BYTES_MAX: usize = 20;
const SECTOR_BYTES: &str = "512";
const PRESERVE: &str = "preserve";
const RESTART: &str = "restart";
/// What `attach` changes in `<memoryBacking>`.
const SHARED: [&str; 2] = ["source", "access"];
/// The model of the panic device that `attach` adds.
const PANIC: &str = "isa";
const MIB: u64 = 1 << 20;
/// Memory regions that QEMU tells a vhost-user server of which does not ask for more (VHOST_MEMORY_BASELINE_NREGIONS).
const PIECES_MAX: usize = 8;
/// Least memory of a board that QEMU's q35 puts on both sides of the hole below 4 GiB.
const SPLIT_BYTES: u64 = 0xb000_0000;

/// Elements of a disk that stay in the definition: they place the disk on the guest's bus.
const PLACE: [&str; 5] = ["target", "boot", "alias", "acpi", "address"];
/// The same, as paths.
const PLACED: &[&str] = &["target/*", "boot/*", "alias/*", "acpi/*", "address/*"];
/// Settings of a disk that Hearth carries out, looks at elsewhere in this file, or has by itself.
const CARRIED: &[&str] = &[
    "@type",
    "@device",
    "driver@name",
    "driver@type",
    "driver@cache=default",
    "driver@cache=none",
    "driver@cache=writeback",
    "driver@queues",
    "driver@discard=unmap",
    "driver@discard_no_unref=off",
    "driver@detect_zeroes=off",
    "driver@copy_on_read=off",
    "driver@error_policy=enospace",
    "driver@rerror_policy=report",
    "driver@ioeventfd=on",
    "driver@event_idx=on",
    "driver@iommu=off",
    "driver@ats=off",
    "driver@packed=off",
    "driver@page_per_vq=off",
    "source@file",
    "source@dev",
    // In the definition of a running domain, and which label libvirt gives to the image.
    "source@index",
    "source/seclabel/*",
    "backingStore/*",
    "readonly",
    "serial",
    "iotune/*",
    "blockio@logical_block_size=0",
    "blockio@logical_block_size=512",
    "blockio@physical_block_size=0",
];

/// A definition that gives disks to Hearth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The domain's name.
    pub name: String,
    /// The changed definition.
    pub xml: String,
    /// Size of the domain's memory when it starts.
    pub memory_bytes: u64,
    /// Disks that Hearth serves, in the order of the definition.
    pub disks: Vec<Disk>,
    /// Disks that stay as they are.
    pub left: Vec<LeftDisk>,
    /// Settings of the domain that have no effect any more, each as a sentence.
    pub dropped: Vec<String>,
}

/// A disk that Hearth serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Name of its target, such as `vda`.
    pub name: String,
    /// Its image.
    pub path: PathBuf,
    /// Format of the image.
    pub format: Format,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// Whether reads and writes pass the host's page cache.
    pub direct: bool,
    /// Serial number that the guest reads; empty if it has none.
    pub serial: String,
    /// Number of queues.
    pub queues: u16,
    /// Limit of MiB a second.
    pub mib_per_second: Option<u64>,
    /// Limit of operations a second.
    pub iops: Option<u64>,
    /// The backing images that the definition names.
    pub backing: Backing,
}

/// What the machine's file says of a disk that Hearth serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The disk's image.
    pub path: PathBuf,
    /// Whether that is a block device.
    pub is_device: bool,
    /// Format of the image.
    pub format: Format,
    /// Number of queues of the disk.
    pub queues: u16,
}

/// Backing images as a definition names them. Usually it names none, and the images themselves count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backing {
    /// From the disk's own one down, each with its format if that is named.
    pub images: Vec<(PathBuf, Option<Format>)>,
    /// Whether the last one, or the disk's image, is said to have none.
    pub ends: bool,
}

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The bytes of the disk.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl Format {
    /// The format of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Raw, Self::Qcow2].into_iter().find(|format| format.name() == name)
    }

    /// Its name in a definition and in machine.toml.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// A disk that Hearth does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftDisk {
    /// Name of its target.
    pub name: String,
    /// Why.
    pub why: String,
}

/// What becomes of a QEMU whose guest has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCrash {
    /// It stays, and its guest stands still.
    Preserve,
    /// It resets its guest. What the domain's owner had chosen for its own panic device stays.
    Restart,
}

/// Why a domain cannot be attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What of the domain prevents it.
    pub what: String,
    /// What its owner can do; empty if nothing.
    pub hint: String,
}

/// Why a definition cannot be changed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum DefinitionError {
    #[error("libvirt's definition of the domain cannot be read")]
    Xml(#[from] roxmltree::Error),
    #[error("libvirt's definition of the domain has no {0}")]
    Missing(&'static str),
    #[error("{}", list(.0))]
    Refused(Vec<Refusal>),
}

fn list(refusals: &[Refusal]) -> String {
    refusals.iter().map(|refusal| refusal.what.as_str()).collect::<Vec<_>>().join("; ")
}

/// The name of the domain.
pub fn name(xml: &str) -> Result<String, DefinitionError> {
    let document = Document::parse(xml)?;
    Domain::of(&document).map(|domain| domain.name().to_owned())
}

/// The definition that gives all disks to Hearth that it can serve, and adds the disk with the cache map if that has a name.
/// `socket`: where a disk of this name is served. `check`: why the image of a disk is not what the definition says of it.
pub fn attach(
    xml: &str,
    cache_map: Option<&str>,
    on_crash: OnCrash,
    socket: impl Fn(&str) -> PathBuf,
    check: impl Fn(&Disk) -> Result<(), String>,
) -> Result<Attached, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    let mut refusals = domain.refusals();
    let vcpus = domain.vcpus();
    let (mut disks, mut left, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    let mut edits = Edits::new(xml);
    for element in domain.disks() {
        let disk = Disk::of(element, vcpus).and_then(|(disk, lost)| check(&disk).map(|()| (disk, lost)));
        match disk {
            Ok((disk, lost)) => {
                dropped.extend(lost.into_iter().map(|(what, why)| format!("{}: {what} {why}", disk.name)));
                let kept = PLACE.into_iter().filter_map(|name| child(element, name));
                let kept: Vec<_> = kept.map(|kept| &xml[kept.range()]).collect();
                edits.replace(element, &served(&socket(&disk.name), disk.queues, &kept));
                disks.push(disk);
            }
            Err(why) => left.push(LeftDisk { name: target(element).to_owned(), why }),
        }
    }
    if disks.is_empty() {
        let reasons: Vec<_> = left.iter().map(|disk| format!("{}: {}", disk.name, disk.why)).collect();
        let what = if reasons.is_empty() { "it has no disk".to_owned() } else { reasons.join("; ") };
        let what = format!("Hearth can serve none of its disks ({what})");
        refusals.push(Refusal { what, hint: "give it a virtio disk in a raw or qcow2 image".to_owned() });
    }
    let memory_bytes = domain.memory_bytes();
    if memory_bytes.is_none() {
        refusals.push(Refusal { what: "its memory has no size that is understood".to_owned(), hint: String::new() });
    }
    let (Some(memory_bytes), true) = (memory_bytes, refusals.is_empty()) else {
        return Err(DefinitionError::Refused(refusals));
    };
    if domain.child("maxMemory").is_some() {
        dropped
            .push("maxMemory: memory that is plugged in while the domain runs is neither kept nor dumped".to_owned());
    }
    domain.share_memory(&mut edits);
    let target = format!("<target dev='{}' bus='virtio'/>", domain.free_target());
    domain.report_crashes(&mut edits, on_crash, cache_map.map(|name| served(&socket(name), 1, &[&target])));
    let name = domain.name().to_owned();
    Ok(Attached { name, xml: edits.apply(), memory_bytes, disks, left, dropped })
}

/// A disk that is served at this socket. `kept`: what places it on the guest's bus.
fn served(socket: &Path, queues: u16, kept: &[&str]) -> String {
    let socket = escaped(&socket.display().to_string());
    let mut lines = vec![
        "<disk type='vhostuser' device='disk'>".to_owned(),
        format!("  <driver name='qemu' type='raw' queues='{queues}'/>"),
        format!("  <source type='unix' path='{socket}'>"),
        "    <reconnect enabled='yes' timeout='1'/>".to_owned(),
        "  </source>".to_owned(),
    ];
    lines.extend(kept.iter().map(|element| format!("  {element}")));
    lines.push("</disk>".to_owned());
    lines.join("\n")
}

/// The current definition with everything that `attach` changed as it was in the original one. Whatever else was changed
/// since stays, and so does the place of a disk on the guest's bus: its target, boot order, alias and address.
/// `ours`: the name of the disk that is served at this socket, if it is one of Hearth's. `image`: what the machine's file
/// says of this disk, if it has it. Its owner may have changed that since.
pub fn detach(
    current: &str,
    original: &str,
    ours: impl Fn(&Path) -> Option<String>,
    image: impl Fn(&str) -> Option<Image>,
) -> Result<String, DefinitionError> {
    let (document, source) = (Document::parse(current)?, Document::parse(original)?);
    let (domain, was) = (Domain::of(&document)?, Domain::of(&source)?);
    let mut edits = Edits::new(current);
    for element in domain.disks() {
        let Some(name) = socket_of(element).and_then(&ours) else { continue };
        // Its target may have been renamed since.
        match was.disks().find(|old| target(*old) == name) {
            Some(old) => {
                let old = with_image(old, original, image(&name), was.vcpus())?;
                edits.replace(element, &placed(&old, element, current)?);
            }
            None => edits.remove(element),
        }
    }
    domain.restore_memory(&mut edits, &was, original);
    domain.restore_crashes(&mut edits, &was, original);
    Ok(edits.apply())
}

/// Whether a QEMU whose guest has panicked stays.
pub fn preserves_crashed(xml: &str) -> Result<bool, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    Ok(text_of(domain.root, "on_crash") == Some(PRESERVE))
}

/// Sockets of the disks of this definition that other programs serve.
pub fn disk_sockets(xml: &str) -> Result<Vec<PathBuf>, DefinitionError> {
    Ok(served_disks(xml)?.into_iter().map(|(_, socket)| socket).collect())
}

/// The disks of this definition that other programs serve: name of the target, and socket.
pub fn served_disks(xml: &str) -> Result<Vec<(String, PathBuf)>, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    let of = |element| socket_of(element).map(|socket| (target(element).to_owned(), socket.to_owned()));
    Ok(domain.disks().filter_map(of).collect())
}

/// The disks of this definition whose images QEMU opens itself: name, image, and its format as far as it is one that Hearth knows.
pub fn own_images(xml: &str) -> Result<Vec<(String, PathBuf, Option<Format>)>, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    let of = |element| {
        let format = attribute_of(element, "driver", "type").and_then(Format::named);
        image(element).ok().map(|path| (target(element).to_owned(), path, format))
    };
    Ok(domain.disks().filter_map(of).collect())
}

/// A domain that is never to run: with QEMU and accelerator of this definition, and nothing else.
pub fn empty(xml: &str, name: &str) -> Result<String, DefinitionError> {
    let document = Document::parse(xml)?;
    let domain = Domain::of(&document)?;
    let kind = escaped(domain.root.attribute("type").unwrap_or("kvm"));
    let emulator = text_of(domain.devices, "emulator").map(escaped);
    let emulator = emulator.map_or_else(String::new, |path| format!("<emulator>{path}</emulator>"));
    Ok(format!(
        "<domain type='{kind}'><name>{name}</name><memory unit='MiB'>32</memory><os><type arch='x86_64'>hvm</type></os>\
         <devices>{emulator}</devices></domain>"
    ))
}

/// Puts back an element that was there; removes one that was not.
fn restore(edits: &mut Edits<'_>, now: Option<Node<'_, '_>>, was: Option<Node<'_, '_>>, original: &str) {
    match (now, was) {
        (Some(now), Some(was)) => edits.replace(now, &unindented(was, original)),
        (Some(now), None) => edits.remove(now),
        (None, _) => {}
    }
}

/// The text of a disk, with what the machine's file says of it if its owner has changed that.
/// `vcpus`: of the domain when it was attached.
fn with_image(disk: Node<'_, '_>, original: &str, image: Option<Image>, vcpus: u16) -> Result<String, DefinitionError> {
    let text = unindented(disk, original);
    let Some(image) = image else { return Ok(text) };
    let document = Document::parse(&text)?;
    let disk = document.root_element();
    let refused = |why| Refusal { what: format!("{}: {why}", target(disk)), hint: String::new() };
    let (was, _) = Disk::of(disk, vcpus).map_err(|why| DefinitionError::Refused(vec![refused(why)]))?;
    let mut edits = Edits::new(&text);
    let is_other = image.path != was.path;
    if is_other {
        let (kind, name) = if image.is_device { ("block", "dev") } else { ("file", "file") };
        edits.set_attribute(disk, "type", kind);
        let source = child(disk, "source")
            .and_then(|source| ["file", "dev"].iter().find_map(|name| source.attribute_node(*name)));
        if let Some(source) = source {
            edits.replace_attribute(source, name, &image.path.display().to_string());
        }
    }
    let queues = (image.queues != was.queues).then(|| ("queues", image.queues.to_string()));
    let format = (image.format != was.format).then(|| ("type", image.format.name().to_owned()));
    // It names the backing images of the earlier one.
    if let Some(store) = child(disk, "backingStore").filter(|_| is_other || format.is_some()) {
        edits.remove(store);
    }
    let settings: Vec<_> = format.into_iter().chain(queues).collect();
    match child(disk, "driver") {
        Some(driver) => settings.iter().for_each(|(name, value)| edits.set_attribute(driver, name, value)),
        None if settings.is_empty() => {}
        None => {
            let settings: String = settings.iter().map(|(name, value)| format!(" {name}='{value}'")).collect();
            edits.add_last(disk, &format!("<driver name='qemu'{settings}/>"));
        }
    }
    Ok(edits.apply())
}

/// The text of a disk, at the place on the guest's bus where it is now.
fn placed(text: &str, now: Node<'_, '_>, current: &str) -> Result<String, DefinitionError> {
    let document = Document::parse(text)?;
    let disk = document.root_element();
    let mut edits = Edits::new(text);
    let mut new = Vec::new();
    for name in PLACE {
        match (child(disk, name), child(now, name)) {
            (Some(was), Some(now)) => edits.replace(was, &unindented(now, current)),
            (Some(was), None) => edits.remove(was),
            (None, Some(now)) => new.push(unindented(now, current)),
            (None, None) => {}
        }
    }
    if !new.is_empty() {
        edits.add_last(disk, &new.join("\n"));
    }
    Ok(edits.apply())
}

/// An element's text, with its further lines as far left as its first one.
fn unindented(element: Node<'_, '_>, text: &str) -> String {
    let start = element.range().start;
    let line = &text[text[..start].rfind('\n').map_or(0, |end| end + 1)..start];
    text[element.range()].replace(&format!("\n{line}"), "\n")
}

pub(crate) fn child<'a, 'i>(parent: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    parent.children().find(|child| child.has_tag_name(name))
}

pub(crate) fn text_of<'a>(parent: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(parent, name)?.text().map(str::trim)
}

pub(crate) fn attribute_of<'a>(parent: Node<'a, '_>, name: &str, attribute: &str) -> Option<&'a str> {
    child(parent, name)?.attribute(attribute)
}

/// Name of a disk's target: what the guest's owner calls the disk.
pub(crate) fn target<'a>(disk: Node<'a, '_>) -> &'a str {
    attribute_of(disk, "target", "dev").unwrap_or_default()
}

/// The socket of a `vhostuser` disk.
fn socket_of<'a>(disk: Node<'a, '_>) -> Option<&'a Path> {
    (disk.attribute("type") == Some("vhostuser")).then(|| attribute_of(disk, "source", "path").map(Path::new))?
}

/// The parts of a definition.
pub(crate) struct Domain<'a, 'i> {
    pub root: Node<'a, 'i>,
    pub devices: Node<'a, 'i>,
}

impl<'a, 'i> Domain<'a, 'i> {
    pub fn of(document: &'a Document<'i>) -> Result<Self, DefinitionError> {
        let root = document.root_element();
        let devices = child(root, "devices").ok_or(DefinitionError::Missing("devices"))?;
        text_of(root, "name").ok_or(DefinitionError::Missing("name"))?;
        Ok(Self { root, devices })
    }

    pub fn child(&self, name: &str) -> Option<Node<'a, 'i>> {
        child(self.root, name)
    }

    pub fn name(&self) -> &'a str {
        text_of(self.root, "name").unwrap_or_default()
    }

    fn vmcoreinfo(&self) -> Option<Node<'a, 'i>> {
        child(self.child("features")?, "vmcoreinfo")
    }

    fn panic_device(&self) -> Option<Node<'a, 'i>> {
        child(self.devices, "panic")
    }

    pub fn vcpus(&self) -> u16 {
        text_of(self.root, "vcpu").and_then(|count| count.parse().ok()).unwrap_or(1)
    }

    pub fn memory_bytes(&self) -> Option<u64> {
        size_of(self.child("memory")?)
    }

    /// Memory that is plugged into the board, such as modules.
    fn memory_devices(&self) -> impl Iterator<Item = Node<'a, 'i>> + use<'a, 'i> {
        self.devices.children().filter(|device| device.has_tag_name("memory"))
    }

    fn cells(&self) -> impl Iterator<Item = Node<'a, 'i>> + use<'a, 'i> {
        let numa = self.child("cpu").and_then(|cpu| child(cpu, "numa"));
        numa.into_iter().flat_map(|numa| numa.children()).filter(|node| node.has_tag_name("cell"))
    }

    /// Pieces of memory that QEMU tells a disk of, at most: each cell and module, what is above 4 GiB, and what UEFI sets apart below
    /// 1 MiB.
    fn memory_pieces(&self) -> usize {
        let modules = self.memory_devices().filter_map(|memory| size_of(child(child(memory, "target")?, "size")?));
        let board_bytes = self.memory_bytes().unwrap_or(0).saturating_sub(modules.fold(0, u64::saturating_add));
        let os = self.child("os");
        let is_uefi = os.is_some_and(|os| os.attribute("firmware") == Some("efi") || child(os, "loader").is_some());
        let parts = usize::from(board_bytes >= SPLIT_BYTES) + usize::from(is_uefi);
        self.cells().count().max(1) + self.memory_devices().count() + parts
    }

    /// A target that no disk has, late in the alphabet.
    fn free_target(&self) -> String {
        let taken: Vec<_> = self.disks().map(target).collect();
        let mut names = ('a'..='z').rev().map(|letter| format!("vd{letter}"));
        names.find(|name| !taken.contains(&name.as_str())).unwrap_or_else(|| "vdaa".to_owned())
    }

    pub fn disks(&self) -> impl Iterator<Item = Node<'a, 'i>> + use<'a, 'i> {
        let is_disk = |node: &Node<'a, 'i>| {
            node.has_tag_name("disk") && matches!(node.attribute("device"), None | Some("disk" | "lun"))
        };
        self.devices.children().filter(is_disk)
    }

    /// Why Hearth cannot keep the memory of this domain.
    fn refusals(&self) -> Vec<Refusal> {
        let mut refusals = Vec::new();
        let mut refuse = |what: &str, hint: &str| {
            refusals.push(Refusal { what: what.to_owned(), hint: hint.to_owned() });
        };
        if !matches!(self.root.attribute("type"), Some("kvm" | "qemu")) {
            refuse("it is not a QEMU domain", "");
        }
        if self.name().bytes().all(|byte| byte.is_ascii_digit()) {
            refuse("virsh takes its name for the number of a running domain", "rename it: virsh domrename");
        }
        let arch = self.child("os").and_then(|os| attribute_of(os, "type", "arch"));
        if arch.is_some_and(|arch| arch != "x86_64") {
            refuse("its processor is not an x86_64 one", "");
        }
        let backing = self.child("memoryBacking");
        let backed = |name| backing.is_some_and(|backing| child(backing, name).is_some());
        if backed("hugepages") {
            refuse("its memory is in huge pages, which cannot be freed one by one", "remove <hugepages/> from it");
        }
        if backed("locked") {
            refuse("its memory is locked, so dead memory could not be freed", "remove <locked/> from it");
        }
        let allocation = backing.and_then(|backing| attribute_of(backing, "allocation", "mode"));
        if allocation == Some("immediate") {
            refuse(
                "all of its memory is taken at its start, so none is left for what its last guest had",
                "remove <allocation/>",
            );
        }
        if self.child("launchSecurity").is_some() {
            refuse("its memory is encrypted (launchSecurity)", "");
        }
        let plugged = || self.memory_devices();
        let model = |memory: Node<'a, '_>| memory.attribute("model").unwrap_or("unknown");
        let mut models: Vec<_> = plugged().map(model).filter(|model| *model != "dimm").collect();
        models.sort_unstable();
        models.dedup();
        if !models.is_empty() {
            let models = models.join(", ");
            refuse(
                &format!("it has memory devices ({models}) that Hearth cannot keep"),
                "remove them, or use <memory model='dimm'>",
            );
        }
        if plugged().filter_map(|memory| child(memory, "source")).any(|source| child(source, "pagesize").is_some()) {
            refuse(
                "a memory device chooses the size of its pages, and huge pages cannot be freed one by one",
                "remove <pagesize> from its <source>",
            );
        }
        let cells = self.cells().map(|cell| cell.attribute("memAccess"));
        if cells.chain(plugged().map(|memory| memory.attribute("access"))).any(|access| access == Some("private")) {
            refuse(
                "a part of its memory is private, so its disks could not be served to it",
                "remove memAccess='private' and access='private' from its cells and memory devices",
            );
        }
        let pieces = self.memory_pieces();
        if pieces > PIECES_MAX {
            refuse(
                &format!(
                    "its memory is in up to {pieces} pieces, and QEMU tells a vhost-user disk of {PIECES_MAX} at most"
                ),
                "give it fewer and larger memory devices or cells",
            );
        }
        if self.devices.children().any(pins_memory) {
            refuse(
                "a device of the host that is passed through pins its memory, so dead memory could not be freed",
                "remove the device from it",
            );
        }
        refusals
    }

    /// Makes the memory a file that QEMU shares with Hearth.
    fn share_memory(&self, edits: &mut Edits<'_>) {
        let (source, access) = ("<source type='memfd'/>", "<access mode='shared'/>");
        let Some(backing) = self.child("memoryBacking") else {
            let before = self.child("vcpu").unwrap_or(self.devices);
            let new = format!("<memoryBacking>\n  {source}\n  {access}\n</memoryBacking>");
            return edits.add_before(before, &new);
        };
        let mut missing = Vec::new();
        for (name, new) in [("source", source), ("access", access)] {
            match child(backing, name) {
                Some(old) => edits.replace(old, new),
                None => missing.push(new),
            }
        }
        if !missing.is_empty() {
            edits.add_last(backing, &missing.join("\n"));
        }
    }

    /// Undoes `share_memory`.
    fn restore_memory(&self, edits: &mut Edits<'_>, was: &Domain<'_, '_>, original: &str) {
        let (Some(now), was) = (self.child("memoryBacking"), was.child("memoryBacking")) else { return };
        let is_shared = |child: Node<'_, '_>| SHARED.contains(&child.tag_name().name());
        if was.is_none() && now.children().filter(Node::is_element).all(is_shared) {
            return edits.remove(now);
        }
        for name in SHARED {
            restore(edits, child(now, name), was.and_then(|was| child(was, name)), original);
        }
    }

    /// Has QEMU report a guest's panic, and where its kernel describes itself for dumps. Adds `device`.
    fn report_crashes(&self, edits: &mut Edits<'_>, on_crash: OnCrash, device: Option<String>) {
        let vmcoreinfo = "<vmcoreinfo state='on'/>";
        match self.child("features") {
            None => edits.add_before(self.devices, &format!("<features>\n  {vmcoreinfo}\n</features>")),
            Some(features) => match child(features, "vmcoreinfo") {
                Some(old) => edits.replace(old, vmcoreinfo),
                None => edits.add_last(features, vmcoreinfo),
            },
        }
        let panic = self.panic_device().is_none().then(|| format!("<panic model='{PANIC}'/>"));
        let devices: Vec<_> = device.into_iter().chain(panic).collect();
        if !devices.is_empty() {
            edits.add_last(self.devices, &devices.join("\n"));
        }
        let now = text_of(self.root, "on_crash");
        let wanted = match on_crash {
            OnCrash::Preserve => PRESERVE,
            OnCrash::Restart if self.may_restart() => RESTART,
            OnCrash::Restart => return,
        };
        let element = format!("<on_crash>{wanted}</on_crash>");
        match self.child("on_crash") {
            None => edits.add_before(self.devices, &element),
            Some(old) if now != Some(wanted) => edits.replace(old, &element),
            Some(_) => {}
        }
    }

    /// Whether a crashed guest may be restarted where the definition says otherwise. Without a panic device libvirt did
    /// not notice a panic: the guest's own setting (`panic=`) decided. By default libvirt would destroy the domain.
    fn may_restart(&self) -> bool {
        self.panic_device().is_none() && matches!(text_of(self.root, "on_crash"), None | Some("destroy"))
    }

    /// Undoes `report_crashes`, where the definition still has what that may have written.
    fn restore_crashes(&self, edits: &mut Edits<'_>, was: &Domain<'_, '_>, original: &str) {
        let vmcoreinfo = self.vmcoreinfo().filter(|now| now.attribute("state") == Some("on"));
        restore(edits, vmcoreinfo, was.vmcoreinfo(), original);
        let is_written = match text_of(self.root, "on_crash") {
            Some(PRESERVE) => true,
            Some(RESTART) => was.may_restart(),
            _ => false,
        };
        if is_written {
            restore(edits, self.child("on_crash"), was.child("on_crash"), original);
        }
        if was.panic_device().is_none() {
            let is_ours =
                |device: &Node<'_, '_>| device.has_tag_name("panic") && device.attribute("model") == Some(PANIC);
            self.devices.children().filter(is_ours).for_each(|device| edits.remove(device));
        }
    }
}

fn pins_memory(device: Node<'_, '_>) -> bool {
    let kind = device.attribute("type");
    device.has_tag_name("hostdev") && matches!(kind, Some("pci" | "mdev"))
        || device.has_tag_name("interface") && matches!(kind, Some("hostdev" | "vdpa"))
        || device.has_tag_name("disk") && matches!(kind, Some("nvme" | "vhostvdpa"))
}

/// A number of bytes with its unit.
fn size_of(element: Node<'_, '_>) -> Option<u64> {
    let number: u64 = element.text()?.trim().parse().ok()?;
    let unit = match element.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// A setting of a disk, and why it has no effect.
pub(crate) type Lost = (String, &'static str);

impl Disk {
    /// The disk of this element, with its settings that have no effect; or why Hearth cannot serve it.
    fn of(element: Node<'_, '_>, vcpus: u16) -> Result<(Self, Vec<Lost>), String> {
        let bus = bus(element);
        if bus != "virtio" {
            return Err(format!("its bus is {bus}, not virtio"));
        }
        match element.attribute("model") {
            None | Some("virtio") => Self::on_any_bus(element, vcpus, &[&["@model"], PLACED]),
            Some(other) => Err(format!("its model is {other}, not virtio")),
        }
    }

    /// As `of`, whatever its bus is. `queues`: how many it has by default. `known`: further settings that have an effect.
    pub(crate) fn on_any_bus(
        element: Node<'_, '_>,
        queues: u16,
        known: &[&[&str]],
    ) -> Result<(Self, Vec<Lost>), String> {
        let driver = |attribute| attribute_of(element, "driver", attribute);
        let path = image(element)?;
        must_be_plain(element)?;
        let format = match driver("type") {
            None => Format::Raw,
            Some(name) => Format::named(name).ok_or_else(|| format!("its format is {name}, not raw or qcow2"))?,
        };
        let serial = text_of(element, "serial").unwrap_or_default();
        let wanted = driver("queues").and_then(|queues| queues.parse().ok()).unwrap_or(queues);
        let mut lost = Vec::new();
        if driver("queues").is_some() && wanted > QUEUES_MAX {
            lost.push((format!("driver queues='{wanted}'"), "is cut to the most that Hearth serves"));
        }
        let read_only = child(element, "readonly").is_some();
        if driver("discard").is_none() && !read_only {
            lost.push(("driver discard='ignore' (the default)".to_owned(), why_lost("driver@discard")));
        }
        let others = unknown(element, &[&[CARRIED], known].concat());
        lost.extend(others.iter().map(|other| (other.shown(), why_lost(&other.path))));
        let (mib_per_second, iops) = limits(element, &mut lost);
        let disk = Self {
            name: target(element).to_owned(),
            path,
            format,
            read_only,
            direct: driver("cache") == Some("none"),
            serial: serial.chars().take(SERIAL_BYTES_MAX).collect(),
            queues: wanted.clamp(1, QUEUES_MAX),
            mib_per_second,
            iops,
            backing: backing(element)?,
        };
        Ok((disk, lost))
    }
}

/// Why a setting of a disk has no effect.
fn why_lost(path: &str) -> &'static str {
    match path {
        "driver@cache" => "has no effect: what the guest flushes is made durable",
        "driver@discard" | "driver@discard_no_unref" => "has no effect: the guest's discards free space in the image",
        "driver@error_policy" | "driver@rerror_policy" => {
            "has no effect: the guest waits while the image's file system is full, and sees all other errors"
        }
        _ => "has no effect",
    }
}

/// The bus of a disk.
pub(crate) fn bus<'a>(disk: Node<'a, '_>) -> &'a str {
    attribute_of(disk, "target", "bus").unwrap_or("unknown")
}

/// The file or block device of a disk; or why it has none that Hearth can open.
fn image(disk: Node<'_, '_>) -> Result<PathBuf, String> {
    let source = |attribute| attribute_of(disk, "source", attribute).map(PathBuf::from);
    let path = match disk.attribute("type") {
        Some("file") => source("file"),
        Some("block") => source("dev"),
        Some("vhostuser") => return Err("another program serves it".to_owned()),
        Some("network") => return Err("it is a network disk".to_owned()),
        Some("volume") => return Err("it is a volume of a pool; name the volume's file instead".to_owned()),
        other => return Err(format!("its type is {}", other.unwrap_or("unknown"))),
    };
    path.ok_or_else(|| "it has no image".to_owned())
}

/// Refuses a disk that would not be the same one without something that Hearth does not do.
fn must_be_plain(disk: Node<'_, '_>) -> Result<(), String> {
    let has = |name| child(disk, name).is_some();
    let source = child(disk, "source");
    let in_source = |name| source.is_some_and(|source| child(source, name).is_some());
    let driver = |attribute| attribute_of(disk, "driver", attribute);
    for (is_so, why) in [
        (has("encryption") || in_source("encryption"), "it is encrypted"),
        (disk.attribute("device") == Some("lun"), "it passes SCSI commands on (device='lun')"),
        (has("transient"), "its changes are to be dropped (transient)"),
        (has("shareable"), "other domains use it, too (shareable)"),
        (has("mirror"), "a block job is under way"),
        (in_source("slices"), "it is a part of its file (slices)"),
        (in_source("dataStore"), "its data is in a file beside its image (dataStore)"),
        (source.is_some_and(|source| source.has_attribute("fdgroup")), "another program opens its image (fdgroup)"),
    ] {
        if is_so {
            return Err(why.to_owned());
        }
    }
    if let Some(cache @ ("writethrough" | "directsync")) = driver("cache") {
        return Err(format!(
            "each write is to be durable before it is answered (cache='{cache}'), and Hearth makes writes durable when the \
             guest flushes; choose cache='none' if the guest flushes its disks, as current systems do"
        ));
    }
    let sector = attribute_of(disk, "blockio", "logical_block_size").unwrap_or("0");
    if !matches!(sector, "0" | SECTOR_BYTES) {
        return Err(format!("its sectors have {sector} bytes, not {SECTOR_BYTES}"));
    }
    match ["iommu", "ats", "packed"].into_iter().find(|attribute| driver(attribute) == Some("on")) {
        Some(attribute) => Err(format!("its driver has {attribute}='on'")),
        None => Ok(()),
    }
}

/// The backing images that the definition names; or why Hearth cannot use one.
fn backing(disk: Node<'_, '_>) -> Result<Backing, String> {
    let mut backing = Backing::default();
    let mut above = disk;
    while let Some(store) = child(above, "backingStore") {
        let Some(kind) = store.attribute("type") else {
            backing.ends = true;
            break;
        };
        let source = child(store, "source");
        let path = match kind {
            "file" => attribute_of(store, "source", "file"),
            "block" => attribute_of(store, "source", "dev"),
            _ => None,
        };
        let path = path.ok_or("its backing image is not a file")?;
        if source.is_some_and(|source| {
            ["encryption", "slices", "dataStore"].iter().any(|name| child(source, name).is_some())
        }) {
            return Err(format!("its backing image {path} is encrypted, or a part of its file"));
        }
        let format = attribute_of(store, "format", "type");
        let format =
            format.map(|name| Format::named(name).ok_or_else(|| format!("its backing image has the format {name}")));
        backing.images.push((path.into(), format.transpose()?));
        above = store;
    }
    Ok(backing)
}

/// Limits of MiB and of operations a second. Others that the disk has are added to `lost`.
fn limits(disk: Node<'_, '_>, lost: &mut Vec<Lost>) -> (Option<u64>, Option<u64>) {
    let Some(tuning) = child(disk, "iotune") else { return (None, None) };
    let (mut mib_per_second, mut iops) = (None, None);
    for limit in tuning.children().filter(Node::is_element) {
        let value = limit.text().and_then(|value| value.trim().parse::<u64>().ok());
        match (limit.tag_name().name(), value) {
            // No limit.
            (_, Some(0)) => {}
            ("total_bytes_sec", Some(bytes)) => mib_per_second = Some(bytes.div_ceil(MIB)),
            ("total_iops_sec", Some(requests)) => iops = Some(requests),
            (other, _) => lost.push((
                format!("iotune/{other}"),
                "has no effect: Hearth limits the reads and writes of each disk together (mib_per_second, iops)",
            )),
        }
    }
    (mib_per_second, iops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{DOMAIN, with, with_cpu, with_device, with_setting};

    fn socket(disk: &str) -> PathBuf {
        PathBuf::from(format!("/run/hearth/web/disk-{disk}.sock"))
    }

    fn ours(path: &Path) -> Option<String> {
        let file = path.strip_prefix("/run/hearth/web").ok()?.to_str()?;
        Some(file.strip_prefix("disk-")?.strip_suffix(".sock")?.to_owned())
    }

    /// The machine's file is as `attach` wrote it.
    fn unchanged(_: &str) -> Option<Image> {
        None
    }

    /// The images are what the definition says.
    #[allow(clippy::unnecessary_wraps, reason = "as `attach` wants it")]
    fn sound(_: &Disk) -> Result<(), String> {
        Ok(())
    }

    fn refused(xml: &str) -> String {
        attach(xml, None, OnCrash::Restart, socket, sound).unwrap_err().to_string()
    }

    #[test]
    fn plain_domain_changes_only_where_it_must() {
        let attached = attach(DOMAIN, Some("cache-map"), OnCrash::Restart, socket, sound).unwrap();
        let expect = DOMAIN
            .replace(
                "  <vcpu placement",
                "  <memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>\n  <vcpu placement",
            )
            .replace("    <apic/>\n", "    <apic/>\n    <vmcoreinfo state='on'/>\n")
            .replace("<on_crash>destroy", "<on_crash>restart")
            .replace(
                "    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>
      <source file='/var/lib/libvirt/images/web.qcow2'/>
      <target dev='vda' bus='virtio'/>
      <serial>root</serial>
",
                "    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='2'/>
      <source type='unix' path='/run/hearth/web/disk-vda.sock'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <target dev='vda' bus='virtio'/>
",
            )
            .replace(
                "    </rng>\n",
                "    </rng>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw' queues='1'/>
      <source type='unix' path='/run/hearth/web/disk-cache-map.sock'>
        <reconnect enabled='yes' timeout='1'/>
      </source>
      <target dev='vdz' bus='virtio'/>
    </disk>
    <panic model='isa'/>
",
            );
        assert_eq!((attached.xml.as_str(), attached.memory_bytes), (expect.as_str(), 2 << 30));
        let disk = Disk {
            name: "vda".to_owned(),
            path: "/var/lib/libvirt/images/web.qcow2".into(),
            format: Format::Qcow2,
            read_only: false,
            direct: true,
            serial: "root".to_owned(),
            queues: 2,
            mib_per_second: None,
            iops: None,
            backing: Backing::default(),
        };
        assert_eq!((attached.disks, attached.left, attached.dropped), (vec![disk], vec![], vec![]));
        assert_eq!(disk_sockets(&attached.xml).unwrap(), [socket("vda"), socket("cache-map")]);
        assert!(disk_sockets(DOMAIN).unwrap().is_empty());
        let empty = empty(DOMAIN, "probe").unwrap();
        assert!(
            empty.contains("<name>probe</name>") && empty.contains("<emulator>/usr/bin/qemu-system-x86_64</emulator>")
        );
    }

    #[test]
    fn detaching_restores_the_definition_and_keeps_later_changes() {
        let attached = attach(DOMAIN, Some("cache-map"), OnCrash::Restart, socket, sound).unwrap().xml;
        assert_eq!(detach(&attached, DOMAIN, ours, unchanged).unwrap(), DOMAIN);
        let later = |text: &str| text.replace(">2097152<", ">4194304<").replace("network='default'", "network='lan'");
        assert_eq!(detach(&later(&attached), DOMAIN, ours, unchanged).unwrap(), later(DOMAIN));
        assert_eq!(detach(DOMAIN, DOMAIN, ours, unchanged).unwrap(), DOMAIN, "what is not attached stays");
    }

    #[test]
    fn settings_that_were_there_come_back() {
        let was = DOMAIN
            .replace("  <vcpu placement", "  <memoryBacking>\n    <nosharepages/>\n    <source type='file'/>\n  </memoryBacking>\n  <vcpu placement")
            .replace("    <apic/>\n", "    <apic/>\n    <vmcoreinfo state='off'/>\n")
            .replace("    </interface>\n", "    </interface>\n    <panic model='pvpanic'/>\n");
        let attached = attach(&was, None, OnCrash::Restart, socket, sound).unwrap().xml;
        let neither = DOMAIN.replace(
            "  <vcpu placement",
            "  <memoryBacking>\n    <nosharepages/>\n  </memoryBacking>\n  <vcpu placement",
        );
        assert_eq!(
            detach(&attach(&neither, None, OnCrash::Restart, socket, sound).unwrap().xml, &neither, ours, unchanged)
                .unwrap(),
            neither
        );
        let backing = "<memoryBacking>\n    <nosharepages/>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>";
        assert!(attached.contains(backing), "{attached}");
        assert!(attached.contains("<vmcoreinfo state='on'/>") && attached.contains("<on_crash>destroy"), "{attached}");
        assert_eq!(detach(&attached, &was, ours, unchanged).unwrap(), was);
    }

    #[test]
    fn detached_disk_stays_where_its_owner_has_put_it() {
        let attached = attach(DOMAIN, Some("cache-map"), OnCrash::Restart, socket, sound).unwrap().xml;
        let target = "<target dev='vda' bus='virtio'/>\n";
        let address = "      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/>\n";
        for (later, expect) in [
            ("<target dev='vdb' bus='virtio'/>\n", "<target dev='vdb' bus='virtio'/>\n"),
            ("<target dev='vda' bus='virtio'/>\n      <boot order='1'/>\n", target),
        ] {
            let detached = detach(&attached.replace(target, later), DOMAIN, ours, unchanged).unwrap();
            let added = later.strip_prefix(target).unwrap_or_default();
            let expect = DOMAIN.replace(target, expect).replace(address, &format!("{address}{added}"));
            assert_eq!(detached, expect);
        }
        let moved = |xml: &str| xml.replace("bus='0x04' slot", "bus='0x09' slot");
        assert_eq!(detach(&moved(&attached), DOMAIN, ours, unchanged).unwrap(), moved(DOMAIN));
        let unplaced = |xml: &str| xml.replace(address, "");
        assert_eq!(detach(&unplaced(&attached), DOMAIN, ours, unchanged).unwrap(), unplaced(DOMAIN));
        // An order that it had, and that another disk has now.
        let ordered = DOMAIN.replace(target, &format!("{target}      <boot order='1'/>\n"));
        let attached = attach(&ordered, None, OnCrash::Restart, socket, sound).unwrap().xml;
        let second = attached.replace("<boot order='1'/>", "<boot order='2'/>");
        assert_eq!(detach(&second, &ordered, ours, unchanged).unwrap(), ordered.replace("order='1'", "order='2'"));
        let none = attached.replace("      <boot order='1'/>\n", "");
        assert_eq!(detach(&none, &ordered, ours, unchanged).unwrap(), DOMAIN);
    }

    #[test]
    fn detached_disk_has_the_image_of_the_machines_file() {
        let attached = attach(DOMAIN, Some("cache-map"), OnCrash::Restart, socket, sound).unwrap().xml;
        let store = "<backingStore type='file'><format type='raw'/><source file='/base'/></backingStore>";
        let backed = DOMAIN.replace("<serial>root</serial>", &format!("<serial>root</serial>\n      {store}"));
        let detached = |plain: &str, path: &str, is_device, format, queues| {
            let image = |name: &str| (name == "vda").then(|| Image { path: path.into(), is_device, format, queues });
            detach(&attached, plain, ours, image).unwrap()
        };
        let path = "/var/lib/libvirt/images/web.qcow2";
        assert_eq!(detached(&backed, path, false, Format::Qcow2, 2), backed, "as it was");
        assert_eq!(detached(&backed, "/x", false, Format::Qcow2, 2), DOMAIN.replace(path, "/x"));
        let device = DOMAIN
            .replace(
                "<disk type='file' device='disk'>\n      <driver name='qemu' type='qcow2'",
                "<disk type='block' device='disk'>\n      <driver name='qemu' type='raw'",
            )
            .replace(&format!("file='{path}'"), "dev='/dev/it&apos;s'");
        assert_eq!(detached(&backed, "/dev/it's", true, Format::Raw, 2), device);
        let queues = backed.replacen("<driver name", "<driver queues='4' name", 1);
        assert_eq!(detached(&backed, path, false, Format::Qcow2, 4), queues);
        let bare = DOMAIN.replace("      <driver name='qemu' type='qcow2' cache='none' discard='unmap'/>\n", "");
        let detached = detached(&bare, path, false, Format::Qcow2, 2);
        assert!(detached.contains("\n      <driver name='qemu' type='qcow2'/>\n"), "{detached}");
    }

    #[test]
    fn memory_keeps_what_its_owner_has_added() {
        let attached = attach(DOMAIN, None, OnCrash::Restart, socket, sound).unwrap().xml;
        let added = attached.replace("  <memoryBacking>\n", "  <memoryBacking>\n    <hugepages/>\n    <locked/>\n");
        let plain = detach(&added, DOMAIN, ours, unchanged).unwrap();
        let backing = "<memoryBacking>\n    <hugepages/>\n    <locked/>\n  </memoryBacking>";
        assert_eq!(plain, with_setting(backing));
        // So a second attach refuses what the first one would have.
        let refused = refused(&plain);
        assert!(refused.contains("huge pages") && refused.contains("locked"), "{refused}");
    }

    #[test]
    fn later_settings_of_crashes_stay() {
        let own_device = DOMAIN.replace("    </interface>\n", "    </interface>\n    <panic model='pvpanic'/>\n");
        for (plain, on_crash, from, to) in [
            (DOMAIN, OnCrash::Preserve, "<on_crash>preserve", "<on_crash>coredump-destroy"),
            (DOMAIN, OnCrash::Restart, "<on_crash>restart", "<on_crash>rename-restart"),
            (&own_device, OnCrash::Preserve, "<on_crash>preserve", "<on_crash>restart"),
        ] {
            let attached = attach(plain, None, on_crash, socket, sound).unwrap().xml;
            assert!(attached.contains(from), "{attached}");
            let detached = detach(&attached.replace(from, to), plain, ours, unchanged).unwrap();
            assert_eq!(detached, plain.replace("<on_crash>destroy", to));
        }
        let model = |xml: &str, from: &str| xml.replace(from, "<panic model='hyperv'/>");
        let attached = attach(&own_device, None, OnCrash::Preserve, socket, sound).unwrap().xml;
        let detached = detach(&model(&attached, "<panic model='pvpanic'/>"), &own_device, ours, unchanged).unwrap();
        assert_eq!(detached, model(&own_device, "<panic model='pvpanic'/>"), "its owner's device");
        let attached = attach(DOMAIN, None, OnCrash::Preserve, socket, sound).unwrap().xml;
        let detached = detach(&model(&attached, "<panic model='isa'/>"), DOMAIN, ours, unchanged).unwrap();
        assert!(detached.contains("<panic model='hyperv'/>"), "{detached}");
    }

    #[test]
    fn crashed_guest_is_preserved_for_its_dump() {
        let on_crash = |text: &str| format!("<on_crash>{text}</on_crash>");
        let own_device = DOMAIN.replace("    </interface>\n", "    </interface>\n    <panic model='pvpanic'/>\n");
        let none = DOMAIN.replace("  <on_crash>destroy</on_crash>\n", "");
        for plain in [DOMAIN, &own_device, &none, &DOMAIN.replace(&on_crash("destroy"), &on_crash("preserve"))] {
            let attached = attach(plain, None, OnCrash::Preserve, socket, sound).unwrap().xml;
            assert!(preserves_crashed(&attached).unwrap(), "{attached}");
            assert_eq!(detach(&attached, plain, ours, unchanged).unwrap(), plain);
            let restarts = attach(plain, None, OnCrash::Restart, socket, sound).unwrap().xml;
            assert_eq!(preserves_crashed(&restarts).unwrap(), preserves_crashed(plain).unwrap(), "{restarts}");
        }
    }

    #[test]
    fn memory_has_the_units_of_libvirt() {
        for (memory, bytes) in [
            ("<memory>1024</memory>", 1 << 20),
            ("<memory unit='bytes'>4096</memory>", 4096),
            ("<memory unit='MB'>2</memory>", 2_000_000),
            ("<memory unit='GiB'> 3 </memory>", 3 << 30),
            ("<memory unit='T'>1</memory>", 1 << 40),
        ] {
            let xml = DOMAIN.replace("<memory unit='KiB'>2097152</memory>", memory);
            assert_eq!(attach(&xml, None, OnCrash::Restart, socket, sound).unwrap().memory_bytes, bytes, "{memory}");
        }
    }

    #[test]
    fn limits_are_carried_over_or_told() {
        let tuned = DOMAIN.replace("cache='none'", "cache='writeback' queues='64'").replace(
            "<serial>root</serial>",
            "<iotune><total_bytes_sec>10000000</total_bytes_sec><total_iops_sec>500</total_iops_sec>\
             <read_iops_sec>9</read_iops_sec><write_iops_sec>0</write_iops_sec><group_name>a</group_name></iotune><readonly/>",
        );
        let attached = attach(&tuned, None, OnCrash::Restart, socket, sound).unwrap();
        let disk = &attached.disks[0];
        assert_eq!((disk.mib_per_second, disk.iops, disk.queues), (Some(10), Some(500), QUEUES_MAX));
        assert!(disk.read_only && !disk.direct && disk.serial.is_empty());
        let [queues, limit, group] = &attached.dropped[..] else { panic!("{:?}", attached.dropped) };
        assert_eq!(queues, "vda: driver queues='64' is cut to the most that Hearth serves");
        assert!(limit.contains("read_iops_sec") && group.contains("group_name"), "{limit} {group}");
    }

    /// Settings of a virtio disk, as libvirt's schema has them: <https://libvirt.org/formatdomain.html>.
    const SETTINGS: [(Fate, &str); 3] = [
        (
            Fate::Carried,
            "@type=file @device=disk @model=virtio driver@name=qemu driver@type=raw driver@cache=default driver@cache=none \
             driver@cache=writeback driver@error_policy=enospace driver@rerror_policy=report driver@ioeventfd=on \
             driver@event_idx=on driver@copy_on_read=off driver@discard=unmap driver@discard_no_unref=off \
             driver@detect_zeroes=off driver@queues=7 driver@iommu=off driver@ats=off driver@packed=off driver@page_per_vq=off \
             source@file=/x source@index=1 source/seclabel@relabel=no source/seclabel/label backingStore@index=1 \
             target@dev=vdb target@bus=virtio target@tray target@removable target@rotation_rate boot@order=1 boot@loadparm \
             readonly serial iotune/total_bytes_sec iotune/total_iops_sec alias@name=a acpi@index=1 address@type=pci \
             address@domain address@bus address@slot address@function address@multifunction address/zpci@uid=1 blockio@logical_block_size=512",
        ),
        (
            Fate::Told,
            "@snapshot=external @rawio=yes @sgio=filtered driver@cache=unsafe driver@error_policy=stop \
             driver@error_policy=report driver@error_policy=ignore driver@rerror_policy=stop driver@rerror_policy=ignore \
             driver@io=native driver@io=threads driver@io=io_uring driver@ioeventfd=off driver@event_idx=off \
             driver@copy_on_read=on driver@discard=ignore driver@discard_no_unref=on driver@detect_zeroes=on \
             driver@detect_zeroes=unmap driver@iothread=1 driver/iothreads driver@queues=64 driver@queue_size=256 \
             driver@page_per_vq=on driver/metadata_cache/max_size driver/statistics/statistic \
             driver@virtio_discard=off driver@virtio_write_zeroes=off source@startupPolicy=optional source/reservations \
             source/privateData auth/secret backenddomain@name iotune/read_bytes_sec iotune/write_bytes_sec iotune/read_iops_sec \
             iotune/write_iops_sec iotune/total_bytes_sec_max iotune/read_bytes_sec_max iotune/write_bytes_sec_max \
             iotune/total_iops_sec_max iotune/read_iops_sec_max iotune/write_iops_sec_max iotune/size_iops_sec iotune/group_name \
             iotune/total_bytes_sec_max_length iotune/read_bytes_sec_max_length iotune/write_bytes_sec_max_length \
             iotune/total_iops_sec_max_length iotune/read_iops_sec_max_length iotune/write_iops_sec_max_length \
             throttlefilters/throttlefilter geometry@cyls=16383 geometry@heads geometry@secs geometry@trans \
             blockio@physical_block_size=4096 blockio@discard_granularity=4096 wwn vendor product privateData \
             setting-of-tomorrow driver@setting-of-tomorrow",
        ),
        (
            Fate::Refused,
            "@type=dir @type=network @type=volume @type=nvme @type=vhostuser @type=vhostvdpa @device=lun \
             @model=virtio-transitional @model=virtio-non-transitional driver@type=qed driver@cache=writethrough \
             driver@cache=directsync driver@iommu=on driver@ats=on driver@packed=on source@fdgroup=a source/slices/slice \
             source/encryption source/dataStore encryption@format=luks shareable transient transient@shareBacking=yes mirror@job=copy \
             target@bus=scsi blockio@logical_block_size=4096 backingStore@type=network backingStore@type=file",
        ),
    ];

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Carried,
        Told,
        Refused,
    }

    #[test]
    fn no_setting_of_a_disk_is_lost_in_silence() {
        const PLAIN: &str = "<disk type='file' device='disk'><driver name='qemu' type='raw' discard='unmap'/><source file='/x'/>\
                             <target dev='vdb' bus='virtio'/></disk>";
        for (expect, paths) in SETTINGS {
            for path in paths.split_whitespace() {
                let element = with(PLAIN, path);
                let attached = match attach(&with_device(&element), None, OnCrash::Restart, socket, sound) {
                    Ok(attached) => attached,
                    // Devices of the host, with which no memory of the domain can be kept.
                    Err(DefinitionError::Refused(_)) if expect == Fate::Refused => continue,
                    Err(error) => panic!("{path}: {error}"),
                };
                let fate = match &attached.left[..] {
                    [] if attached.dropped.is_empty() => Fate::Carried,
                    [] => Fate::Told,
                    [left] => {
                        assert!(attached.xml.contains(&element), "it stays as it was: {element}");
                        assert!(left.name == "vdb" && !left.why.is_empty(), "{left:?}");
                        Fate::Refused
                    }
                    more => panic!("{path}: {more:?}"),
                };
                assert_eq!(fate, expect, "{path}: {:?} {:?}", attached.left, attached.dropped);
                let first = path.split(['/', '@', '=']).find(|name| !name.is_empty()).unwrap_or_default();
                let is_named = attached.dropped.iter().all(|told| told.starts_with("vdb: ") && told.contains(first));
                assert!(is_named, "{path}: {:?}", attached.dropped);
            }
        }
    }

    #[test]
    fn setting_without_effect_is_told_with_its_value() {
        let told = |attribute: &str| {
            let xml = DOMAIN.replace("discard='unmap'", attribute);
            attach(&xml, None, OnCrash::Restart, socket, sound).unwrap().dropped.concat()
        };
        assert_eq!(told("io='native' discard='unmap'"), "vda: driver io='native' has no effect");
        let kept = told("discard='ignore'");
        assert_eq!(kept, "vda: driver discard='ignore' has no effect: the guest's discards free space in the image");
        let default =
            "vda: driver discard='ignore' (the default) has no effect: the guest's discards free space in the image";
        assert_eq!(told(""), default);
        let read_only = DOMAIN.replace(" discard='unmap'", "").replace("<serial>", "<readonly/><serial>");
        let dropped = attach(&read_only, None, OnCrash::Restart, socket, sound).unwrap().dropped;
        assert!(dropped.is_empty(), "a guest cannot discard there: {dropped:?}");
    }

    #[test]
    fn backing_images_are_read_from_the_definition() {
        let chain = |inner: &str| {
            let xml = DOMAIN.replace("<serial>root</serial>", inner);
            attach(&xml, None, OnCrash::Restart, socket, sound).map(|attached| attached.disks[0].backing.clone())
        };
        assert_eq!(chain("").unwrap(), Backing::default());
        assert_eq!(chain("<backingStore/>").unwrap(), Backing { images: vec![], ends: true });
        let two = "<backingStore type='file'><format type='qcow2'/><source file='/a'/>\
                   <backingStore type='block'><format type='raw'/><source dev='/dev/b'/>END</backingStore></backingStore>";
        let images = vec![("/a".into(), Some(Format::Qcow2)), ("/dev/b".into(), Some(Format::Raw))];
        assert_eq!(chain(&two.replace("END", "")).unwrap(), Backing { images: images.clone(), ends: false });
        assert_eq!(chain(&two.replace("END", "<backingStore/>")).unwrap(), Backing { images, ends: true });
        for (inner, why) in [
            ("<backingStore type='network'><source protocol='nbd'/></backingStore>", "not a file"),
            ("<backingStore type='file'><format type='vmdk'/><source file='/a'/></backingStore>", "format vmdk"),
            (
                "<backingStore type='file'><source file='/a'><slices/></source></backingStore>",
                "/a is encrypted, or a part",
            ),
        ] {
            let refused = chain(inner).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn disk_whose_image_is_another_one_stays() {
        let check = |disk: &Disk| match disk.name.as_str() {
            "vda" => Err("its image is another one".to_owned()),
            _ => Ok(()),
        };
        let refused = attach(DOMAIN, None, OnCrash::Restart, socket, check).unwrap_err().to_string();
        assert!(refused.contains("vda: its image is another one"), "{refused}");
        let second = "<disk type='file'><source file='/x'/><target dev='vdb' bus='virtio'/></disk>";
        let attached = attach(&with_device(second), None, OnCrash::Restart, socket, check).unwrap();
        assert_eq!((attached.disks.len(), attached.left[0].name.as_str()), (1, "vda"));
    }

    #[test]
    fn disk_that_cannot_be_served_is_told_why() {
        for (element, why) in [
            ("<disk type='network' device='disk'><target dev='vdb' bus='virtio'/></disk>", "network"),
            ("<disk type='file'><source file='/x'/><target dev='vdb' bus='scsi'/></disk>", "scsi"),
            (
                "<disk type='file'><driver type='vmdk'/><source file='/x'/><target dev='vdb' bus='virtio'/></disk>",
                "vmdk",
            ),
            (
                "<disk type='file'><source file='/x'><encryption format='luks'/></source><target dev='vdb' bus='virtio'/></disk>",
                "encrypted",
            ),
            (
                "<disk type='file'><driver cache='directsync'/><source file='/x'/><target dev='vdb' bus='virtio'/></disk>",
                "choose cache='none'",
            ),
            ("<disk type='file'><target dev='vdb' bus='virtio'/></disk>", "no image"),
        ] {
            let attached = attach(&with_device(element), None, OnCrash::Restart, socket, sound).unwrap();
            assert!(attached.xml.contains(element), "{element}");
            let [left] = &attached.left[..] else { panic!("{element}: {:?}", attached.left) };
            assert!(left.name == "vdb" && left.why.contains(why), "{left:?}");
        }
    }

    #[test]
    fn every_piece_of_memory_counts() {
        let pieces = |xml: &str| Domain::of(&Document::parse(xml).unwrap()).unwrap().memory_pieces();
        let module = "<memory model='dimm'><target><size unit='GiB'>4</size></target></memory>";
        let large = |xml: &str| xml.replace("<memory unit='KiB'>", "<memory unit='KiB'>1000");
        assert_eq!(pieces(DOMAIN), 1);
        assert_eq!(pieces(&with_cpu("<cpu><numa><cell/><cell/></numa></cpu>")), 2);
        assert_eq!(pieces(&with_device(&module.repeat(3))), 4);
        // A part of it is above 4 GiB.
        assert_eq!(pieces(&large(DOMAIN)), 2);
        assert_eq!(pieces(&DOMAIN.replace("<os>", "<os firmware='efi'>")), 2);
        // libvirt defines no such domain.
        assert_eq!(pieces(&with_device(&module.replace(">4<", ">17179869183<").repeat(2))), 3);
    }

    #[test]
    fn domain_that_cannot_be_attached_is_told_all_reasons() {
        let memory = |element: &str| with_setting(&format!("<memoryBacking>{element}</memoryBacking>"));
        for (xml, why) in [
            (memory("<hugepages/>"), "huge pages"),
            (memory("<locked/>"), "locked"),
            (memory("<allocation mode='immediate'/>"), "all of its memory is taken"),
            (with_device("<hostdev mode='subsystem' type='pci'/>"), "passed through"),
            (DOMAIN.replace("bus='virtio'", "bus='sata'"), "vda: its bus is sata"),
            (DOMAIN.replace("type='kvm'", "type='xen'"), "not a QEMU domain"),
            (DOMAIN.replace("<memory unit='KiB'>", "<memory unit='bushels'>"), "no size"),
            (DOMAIN.replace("x86_64", "aarch64"), "x86_64"),
            (
                with_device("<memory model='dimm'/>\n    <memory model='virtio-mem'/>\n    <memory model='nvdimm'/>"),
                "memory devices (nvdimm, virtio-mem)",
            ),
            (with_device("<memory model='dimm' access='private'/>"), "is private"),
            (
                with_device("<memory model='dimm'><source><pagesize>2048</pagesize></source></memory>"),
                "size of its pages",
            ),
            (with_cpu("<cpu><numa><cell/><cell memAccess='private'/></numa></cpu>"), "is private"),
            (with_device(&"<memory model='dimm'/>".repeat(8)), "in up to 9 pieces"),
        ] {
            assert!(refused(&xml).contains(why), "{why}: {}", refused(&xml));
        }
        // The memory of several cells and of memory modules is kept. What is plugged in later is not.
        let cells = with_cpu("<cpu><numa><cell/><cell memAccess='shared'/></numa></cpu>");
        for sound_memory in [cells, with_device("<memory model='dimm' access='shared'/>")] {
            let attached = attach(&sound_memory, None, OnCrash::Restart, socket, sound).unwrap();
            assert!(attached.dropped.is_empty(), "{:?}", attached.dropped);
        }
        let slots = with_setting("<maxMemory slots='4' unit='GiB'>8</maxMemory>");
        let [told] = &attach(&slots, None, OnCrash::Restart, socket, sound).unwrap().dropped[..] else { panic!() };
        assert!(told.starts_with("maxMemory: "), "{told}");
        let both = memory("<hugepages/>").replace("bus='virtio'", "bus='sata'");
        assert!(refused(&both).contains("huge pages") && refused(&both).contains("sata"));
        assert!(
            attach("<domain", None, OnCrash::Restart, socket, sound).is_err()
                && attach("<domain/>", None, OnCrash::Restart, socket, sound).is_err()
        );
    }
}
